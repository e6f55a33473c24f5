"""The plugin system: it finds plugins, keeps what they contribute, chooses among it and shows it."""

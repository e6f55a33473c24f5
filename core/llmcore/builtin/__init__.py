"""Built-in policy, on the same hooks as any plugin. Only the plugin loader names these modules."""

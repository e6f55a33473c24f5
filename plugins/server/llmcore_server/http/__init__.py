"""The HTTP side: Falcon on waitress, detached replies, and the bridge to an engine in another process."""

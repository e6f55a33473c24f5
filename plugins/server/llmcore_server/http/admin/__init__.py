"""The admin listener: a process of its own that says how the server is, whatever its streams do."""

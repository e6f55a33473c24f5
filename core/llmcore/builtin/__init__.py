"""Built-in policy, on the same hooks as any plugin. The plugin loader lists them, and no other module imports them."""

"""Community families."""

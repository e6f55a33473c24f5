"""Grouped-query attention over token slots."""

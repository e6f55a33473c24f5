"""Counted slots, the tables that name them, and the groups of a model as one space. Mechanism, no policy."""

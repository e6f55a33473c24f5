"""Measurements of an engine in this process (`engine_runs`), or of any server over HTTP (`load`, without torch)."""

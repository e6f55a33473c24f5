"""Measuring: an engine in this process (`engine_runs`), or any server over HTTP (`load`, which needs no torch)."""

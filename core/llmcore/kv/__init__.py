"""KV slots with reference counts, the request tables that name them, and all KV groups of a model as one space.

This package is mechanism; policy is in the prefix cache (`protocols.KVManager`) and in the scheduler.
"""

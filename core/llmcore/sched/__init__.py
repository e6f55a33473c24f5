"""Queues, admission and plans. No torch."""

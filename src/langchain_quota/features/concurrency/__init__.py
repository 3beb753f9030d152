"""Concurrency limits: how many tool calls may run at the same time."""

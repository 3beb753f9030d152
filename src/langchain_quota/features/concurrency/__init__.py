"""Calls that run at the same time."""

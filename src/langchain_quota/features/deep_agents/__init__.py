"""Limits of deepagents and their sub-agents."""

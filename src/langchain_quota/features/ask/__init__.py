"""Questions to a person at a limit."""

"""What users attach to their agents and graphs."""

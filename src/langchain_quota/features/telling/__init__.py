"""What the model is told, and which tools it is offered."""

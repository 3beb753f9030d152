"""Budgets of tokens and money."""

"""Budgets of tokens, money and time."""

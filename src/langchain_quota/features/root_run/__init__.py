"""Quotas per root run."""

"""Simulate an outage of a provider, with the same policies, budgets and gate as in workers."""

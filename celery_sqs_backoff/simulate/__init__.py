"""Simulate an outage of a provider, with the policies, budgets and gate that workers use."""

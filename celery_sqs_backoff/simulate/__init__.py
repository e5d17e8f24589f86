"""Simulate an outage of a provider, with the workers' own delay policies and circuit breaker."""

"""Gate, recall and rate of a provider: an outage belongs to the provider, not to the message."""

from .settings import Provider

__all__ = ["Provider"]

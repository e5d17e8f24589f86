"""Gate, recall and rate of a provider, so that an outage uses up no attempts of a message."""

from .settings import Provider

__all__ = ["Provider"]

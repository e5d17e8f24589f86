"""Decides when tasks that call a provider run, so that a provider's outage uses up no attempts.

A provider is an outside service that tasks call.
"""

from .settings import Provider

__all__ = ["Provider"]

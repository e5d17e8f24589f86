"""Distinguish the user's Celery app from Celery's fallback app. This module does not need click."""

from __future__ import annotations

from typing import Any


def is_fallback_app(app: Any) -> bool:
    """Return whether this is the fallback app, which Celery makes if the user has named no app.

    The fallback app has Celery's default broker, so commands must not use it. See
    ``_get_current_app`` in celery/_state.py.
    """
    return app.main == "default" and not app.set_as_current

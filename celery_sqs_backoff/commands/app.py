"""Tell the user's Celery app from the one that Celery makes up. Imported without click."""

from __future__ import annotations

from typing import Any


def is_made_up(app: Any) -> bool:
    """Return whether Celery made this app itself, because the user has not named one.

    Such an app has a broker of its own.

    See ``_get_current_app`` in celery/_state.py.
    """
    return app.main == "default" and not app.set_as_current

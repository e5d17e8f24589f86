"""Which Celery app is the project's? Asked by what runs without ``celery -A``."""

from __future__ import annotations

from typing import Any

from celery import current_app
from celery.exceptions import ImproperlyConfigured


def project_app() -> Any:
    """Return the project's Celery app: the one that its ``__init__.py`` imports.

    Raises:
        ImproperlyConfigured: this process has imported none. Celery gives an app of its own then,
            which has another broker and other queues than the project.
    """
    app = current_app._get_current_object()
    if app.main == "default" and not app.set_as_current:  # celery/_state.py: _get_current_app
        raise ImproperlyConfigured(
            "the project's Celery app is not imported: write 'from .celery import app as"
            " celery_app' into the __init__.py beside settings.py"
        )
    return app

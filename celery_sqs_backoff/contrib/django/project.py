"""Find the project's Celery app for code that runs without ``celery -A``."""

from __future__ import annotations

from typing import Any

from celery import current_app
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff.commands.app import is_fallback_app


def project_app() -> Any:
    """Return the Celery app that the project's ``__init__.py`` imports.

    Raises:
        ImproperlyConfigured: this process has not imported an app.
    """
    app = current_app._get_current_object()
    if is_fallback_app(app):
        raise ImproperlyConfigured(
            "the project's Celery app is not imported: write 'from .celery import app as"
            " celery_app' into the __init__.py beside settings.py"
        )
    return app

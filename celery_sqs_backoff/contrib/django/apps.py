"""The config of the Django app ``"celery_sqs_backoff.contrib.django"`` for ``INSTALLED_APPS``."""

from __future__ import annotations

from django.apps import AppConfig  # type: ignore[import-untyped]


class CelerySQSBackoffConfig(AppConfig):  # type: ignore[misc]
    """The Django app. Its tables and migrations use the label ``celery_sqs_backoff``."""

    name = "celery_sqs_backoff.contrib.django"
    label = "celery_sqs_backoff"
    verbose_name = "Celery on SQS"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system check."""
        from . import checks  # noqa: F401

"""Send the calls that are left in the outbox; a worker does so by itself, once a minute."""

from __future__ import annotations

from typing import Any

from celery.exceptions import ImproperlyConfigured
from django.core.management.base import (  # type: ignore[import-untyped]
    BaseCommand,
    CommandError,
)

from celery_sqs_backoff.safe.outbox import send_left_calls, use_autocommit

from ...project import project_app

__all__ = ["Command"]


class Command(BaseCommand):  # type: ignore[misc]
    help = "Send durable calls of tasks that a crash or a broker outage has left unsent."

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            app = project_app()
        except ImproperlyConfigured as exc:
            raise CommandError(f"nothing is sent: {exc}") from exc
        use_autocommit()
        sent = send_left_calls(app)
        self.stdout.write(f"{sent} sent")

"""Send the calls that are left in the outbox; a worker does so by itself, once a minute."""

from __future__ import annotations

from typing import Any

from celery import current_app
from django.core.management.base import BaseCommand  # type: ignore[import-untyped]

from celery_sqs_backoff.safe.outbox import send_left_calls, use_autocommit

__all__ = ["Command"]


class Command(BaseCommand):  # type: ignore[misc]
    help = "Send durable calls of tasks that a crash or a broker outage has left unsent."

    def handle(self, *args: Any, **options: Any) -> None:
        use_autocommit()
        sent = send_left_calls(current_app._get_current_object())
        self.stdout.write(f"{sent} sent")

"""Send the durable calls that are still in the outbox. Run this command about once a minute."""

from __future__ import annotations

from typing import Any

from celery.exceptions import ImproperlyConfigured
from django.core.management.base import (  # type: ignore[import-untyped]
    BaseCommand,
    CommandError,
)
from django.db import DatabaseError, InterfaceError  # type: ignore[import-untyped]

from celery_sqs_backoff.store.errors import StoreInTransaction
from celery_sqs_backoff.text import error_site

from ...outbox import send_left_calls
from ...project import project_app


class Command(BaseCommand):  # type: ignore[misc]
    help = "Send durable calls that were not sent because of a crash or a broker outage."

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            sent, unsent = send_left_calls(project_app())
        except (DatabaseError, InterfaceError) as exc:
            raise CommandError(f"the database did not answer: {error_site(exc)}") from exc
        except (ImproperlyConfigured, StoreInTransaction) as exc:
            raise CommandError(f"no call is sent: {exc}") from exc
        self.stdout.write(f"{sent} sent")
        if unsent:
            raise CommandError(f"{unsent} could not be sent; the next run tries again")

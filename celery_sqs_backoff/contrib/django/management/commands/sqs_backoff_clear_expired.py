"""Delete the records that have ended from the store ``"django://"``.

Run it daily, like ``clearsessions``.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from celery.exceptions import ImproperlyConfigured
from django.core.management.base import (  # type: ignore[import-untyped]
    BaseCommand,
    CommandError,
)

from celery_sqs_backoff.store.django import DjangoStore
from celery_sqs_backoff.store.errors import StoreUnavailable
from celery_sqs_backoff.store.settings import store_of

from ...project import project_app


class Command(BaseCommand):  # type: ignore[misc]
    help = "Delete the records of guards, locks, steps and others that have ended."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", help="alias in DATABASES. Default: the store's")

    def handle(self, *args: Any, database: str | None, **options: Any) -> None:
        try:
            store = DjangoStore(database) if database else store_of(project_app())
        except ImproperlyConfigured as exc:
            raise CommandError(f"no record is removed: {exc}") from exc
        if not isinstance(store, DjangoStore):
            raise CommandError("no record is removed: the app's store is not Django's database")
        try:
            removed = store.remove_expired()
        except StoreUnavailable as exc:
            raise CommandError(f"not all ended records are removed: {exc}") from exc
        self.stdout.write(f"{removed} removed")

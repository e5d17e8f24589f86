"""Delete expired records in the store ``"django://"``.

Run this command daily, like ``clearsessions``.
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
    help = "Delete expired records of guards, locks, steps and workflows from the database."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database", help="alias in DATABASES. Default: the alias of the app's store"
        )

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
            raise CommandError(f"not all expired records were removed: {exc}") from exc
        self.stdout.write(f"{removed} removed")

"""Remove the store's records that have ended; to be run daily, like ``clearsessions``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand  # type: ignore[import-untyped]

from celery_sqs_backoff.safe.stores.django import DjangoStore

__all__ = ["Command"]


class Command(BaseCommand):  # type: ignore[misc]
    help = "Remove records of celery_sqs_backoff.safe (guards, locks, steps, keys) that have ended."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--database", default="default", help="alias in DATABASES. Default: default"
        )

    def handle(self, *args: Any, database: str, **options: Any) -> None:
        removed = DjangoStore(database).remove_expired()
        self.stdout.write(f"{removed} removed")

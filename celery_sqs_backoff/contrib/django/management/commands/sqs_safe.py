"""``manage.py sqs_safe``: ``celery sqs-safe`` on the project's Celery app."""

from __future__ import annotations

from celery_sqs_backoff.commands.safe import sqs_safe

from ...shell import CeleryShell


class Command(CeleryShell):
    help = sqs_safe.help or ""
    command = sqs_safe

"""``manage.py sqs_peek``: ``celery sqs-peek`` on the project's Celery app."""

from __future__ import annotations

from celery_sqs_backoff.commands.peek import sqs_peek

from ...shell import CeleryShell


class Command(CeleryShell):
    help = sqs_peek.help or ""
    command = sqs_peek

"""``manage.py sqs_status``: ``celery sqs-status`` on the project's Celery app."""

from __future__ import annotations

from celery_sqs_backoff.commands.status import sqs_status

from ...shell import CeleryShell


class Command(CeleryShell):
    help = sqs_status.help or ""
    command = sqs_status

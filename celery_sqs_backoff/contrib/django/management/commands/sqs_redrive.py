"""``manage.py sqs_redrive``: ``celery sqs-redrive`` on the project's Celery app."""

from __future__ import annotations

from celery_sqs_backoff.commands.redrive import sqs_redrive

from ...shell import CeleryShell


class Command(CeleryShell):
    help = sqs_redrive.help or ""
    command = sqs_redrive

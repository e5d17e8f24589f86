"""``manage.py sqs_health``: ``celery sqs-health`` on the project's Celery app."""

from __future__ import annotations

from celery_sqs_backoff.commands.health import sqs_health

from ...shell import CeleryShell


class Command(CeleryShell):
    help = sqs_health.help or ""
    command = sqs_health

"""``manage.py sqs_simulate``: ``celery sqs-simulate`` on the project's Celery app."""

from __future__ import annotations

from celery_sqs_backoff.commands.simulate import sqs_simulate

from ...shell import CeleryShell


class Command(CeleryShell):
    help = sqs_simulate.help or ""
    command = sqs_simulate

"""``manage.py sqs_doctor``: ``celery sqs-doctor`` on the project's Celery app."""

from __future__ import annotations

from celery_sqs_backoff.commands.doctor import sqs_doctor

from ...shell import CeleryShell


class Command(CeleryShell):
    help = sqs_doctor.help or ""
    command = sqs_doctor

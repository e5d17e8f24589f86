"""Run ``celery sqs-safe`` on the project's Celery app, as ``manage.py sqs_safe``."""

from celery_sqs_backoff.commands.safe import sqs_safe

from ...shell import manage_command

Command = manage_command(sqs_safe)

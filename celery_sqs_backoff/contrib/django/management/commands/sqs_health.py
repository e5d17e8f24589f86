"""Run ``celery sqs-health`` on the project's Celery app, as ``manage.py sqs_health``."""

from celery_sqs_backoff.commands.health import sqs_health

from ...shell import manage_command

Command = manage_command(sqs_health)

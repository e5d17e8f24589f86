"""Run ``celery sqs-status`` on the project's Celery app, as ``manage.py sqs_status``."""

from celery_sqs_backoff.commands.status import sqs_status

from ...shell import manage_command

Command = manage_command(sqs_status)

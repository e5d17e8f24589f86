"""Run ``celery sqs-peek`` on the project's Celery app, as ``manage.py sqs_peek``."""

from celery_sqs_backoff.commands.peek import sqs_peek

from ...shell import manage_command

Command = manage_command(sqs_peek)

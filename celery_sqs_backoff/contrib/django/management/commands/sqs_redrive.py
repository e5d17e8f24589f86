"""Run ``celery sqs-redrive`` on the project's Celery app, as ``manage.py sqs_redrive``."""

from celery_sqs_backoff.commands.redrive import sqs_redrive

from ...shell import manage_command

Command = manage_command(sqs_redrive)

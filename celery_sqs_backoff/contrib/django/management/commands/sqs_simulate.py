"""Run ``celery sqs-simulate`` on the project's Celery app, as ``manage.py sqs_simulate``."""

from celery_sqs_backoff.commands.simulate import sqs_simulate

from ...shell import manage_command

Command = manage_command(sqs_simulate)

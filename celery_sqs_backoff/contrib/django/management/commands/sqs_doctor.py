"""Run ``celery sqs-doctor`` on the project's Celery app, as ``manage.py sqs_doctor``."""

from celery_sqs_backoff.commands.doctor import sqs_doctor

from ...shell import manage_command

Command = manage_command(sqs_doctor)

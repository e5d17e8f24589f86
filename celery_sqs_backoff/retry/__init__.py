"""Decisions about a failed run. Pure, without Celery and boto3; time and chance are arguments."""

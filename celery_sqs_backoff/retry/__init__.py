"""Decide whether a failed task is retried, and when. Pure code, without Celery and boto3."""

"""Celery's and kombu's own tests, on stock and with our task class, compared test by test."""

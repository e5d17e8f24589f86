"""Run Celery's and kombu's own tests with stock tasks and with our task class, and compare."""

"""What is decided about a failed run, pure: no Celery, no boto3; time and randomness come in."""

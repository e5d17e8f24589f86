"""Commands, such as ``celery sqs-redrive``. They parse options, call the engines, and print."""

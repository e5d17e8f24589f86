"""Run in a worker's main process: receive messages, give them to Celery, delete or hide them."""

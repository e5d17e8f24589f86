"""Code for a worker's main process.

It receives messages from SQS, and gives them to Celery. When a task ends, it deletes or hides the
message.
"""

"""Code for a worker's main process.

The main process receives messages from SQS, and gives them to Celery. When a task ends, the main
process deletes or hides the task's message.
"""

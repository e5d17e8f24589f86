"""What Amazon SQS is: its limits, queues, messages and calls."""

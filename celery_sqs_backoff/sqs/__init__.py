"""Amazon SQS: its limits, queues, messages and calls."""

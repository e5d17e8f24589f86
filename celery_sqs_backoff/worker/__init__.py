"""The worker's main process: hold messages, hand them to the pool, settle them with SQS."""

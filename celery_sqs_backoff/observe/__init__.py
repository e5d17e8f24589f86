"""Events, metrics, log lines and status of queues and workers."""

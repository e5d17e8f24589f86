"""Emit and show events, metrics, log lines and the status of queues and workers."""

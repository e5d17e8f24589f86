"""What can be seen of queues and workers from outside."""

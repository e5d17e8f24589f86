"""What a worker remembers of messages that it has received."""

from celery_sqs_backoff.worker.settlement import Memory


def test_size_of_memory():
    """The worker remembers as many messages as a queue can have in flight.

    During an outage they come round hidden, and each would be forgotten before it is back.
    """
    memory = Memory()
    for _ in range(2):
        for number in range(100_000):
            memory.count_given_back(str(number), due_since=1.0)
    assert memory.times_given_back["0"] == 2
    assert memory.due_since["0"] == 1.0

"""What a worker remembers about messages that it has given back."""

from celery_sqs_backoff.worker.settlement import Memory


def test_size_of_memory():
    """The worker can remember about as many messages as a queue can have in flight.

    In an outage all of them come again and again. With less memory, the worker would forget each
    message before it comes again.
    """
    memory = Memory()
    for _ in range(2):
        for number in range(100_000):
            memory.count_given_back(str(number), due_since=1.0)
    assert memory.times_given_back["0"] == 2
    assert memory.due_since["0"] == 1.0

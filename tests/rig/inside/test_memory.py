"""What a worker remembers of messages that it has received."""

from celery_sqs_backoff.worker.settlement import Memory


def test_as_many_messages_are_remembered_as_a_queue_can_have_in_flight():
    """Hidden in a circle during an outage, each would be forgotten before it comes back."""
    memory = Memory()
    for _ in range(2):
        for number in range(100_000):
            memory.count_given_back(str(number), due_since=1.0)
    assert memory.times_given_back["0"] == 2
    assert memory.due_since["0"] == 1.0

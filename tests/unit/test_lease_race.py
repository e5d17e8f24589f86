"""A lost message that is received again while its run ends."""

from __future__ import annotations

from collections.abc import Callable

from celery_sqs_backoff.sqs.queues import Queue
from celery_sqs_backoff.sqs.settlement import Row, Want

from .test_keeper import Bench

QUEUE = Queue("https://sqs.example/1/q")


def row(handle: str) -> Row:
    return Row(QUEUE, "m", handle, 1_000.0)


def test_the_end_of_a_lost_run_counts_once() -> None:
    lost = row("h1")
    lost.become(Want.LOST)
    assert lost.end_run(Want.DELETE) is Want.LOST
    assert lost.end_run(Want.DELETE) is None


def test_a_message_that_is_held_again_is_settled_by_its_run() -> None:
    lost = row("h1")
    lost.become(Want.LOST)
    lost.hold_again(row("h2"))
    assert lost.end_run(Want.DELETE) is Want.HELD
    assert lost.want is Want.DELETE


def test_a_lost_message_that_is_received_again_while_its_run_ends_is_not_held_for_good() -> None:
    """Nobody would settle it: its run has ended."""
    bench = Bench()
    lease = bench.lease(message_id="m")
    lease.handed_to_pool = lambda: True
    lease.become(Want.LOST)
    lease.guard = HoldsAgain(lambda: bench.lease(message_id="m"))
    lease.done()
    assert bench.keeper.held() == []


class HoldsAgain:
    """A lock; before it is taken for the second time, the message is received again."""

    def __init__(self, receive: Callable[[], object]) -> None:
        self._receive, self._taken = receive, 0

    def __enter__(self) -> None:
        self._taken += 1
        if self._taken == 2:
            self._receive()

    def __exit__(self, *exc_info: object) -> None:
        pass

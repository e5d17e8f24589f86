"""The calls of a worker that stops: what it has hidden comes back soon."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from celery_sqs_backoff.provider.gate import Hidden
from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.worker.handover import batches, hand_over

NOW, HOUR = 1000.0, 3600.0


def hidden(name: str, until: float = NOW + HOUR, *, queue: str = "mail") -> Hidden:
    return Hidden(name, f"handle of {name}", queue, until)


class Port:
    """Two queues' calls; one may hang, or fail."""

    def __init__(self, *, hangs: bool = False, failure: Failure | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.may_go_on = threading.Event()
        if not hangs:
            self.may_go_on.set()
        self._failure = failure

    def of(self, url: str) -> Any:
        self.url = url
        return self

    def change_visibility(self, entries: list[tuple[str, int]]) -> list[Failure | None]:
        self.calls.append((self.url, len(entries)))
        self.may_go_on.wait(60)
        return [self._failure] * len(entries)


def test_calls_are_of_one_queue_and_ten_messages_at_most() -> None:
    found = [(hidden(f"m{i}", NOW + HOUR - i, queue="ab"[i % 2]), i) for i in range(34)]
    port = Port()
    assert hand_over(found, port.of) == 34
    assert sorted(count for _, count in port.calls) == [7, 7, 10, 10]
    first = next(batches(found))
    assert first == ("a", [(f"handle of m{i}", i) for i in range(0, 20, 2)])


def of_one_queue(calls: int) -> list[tuple[Hidden, int]]:
    return [(hidden(f"m{i}"), 1) for i in range(10 * calls)]


def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_worker() -> None:
    port = Port(hangs=True)
    assert hand_over(of_one_queue(30), port.of, longest_seconds=0.05) == 0
    assert len(port.calls) <= 8
    port.may_go_on.set()


@pytest.mark.parametrize(
    ("is_of_call", "calls"), [(True, range(1, 9)), (False, [30])], ids=["call", "entry"]
)
def test_a_queue_that_is_away_is_not_called_again_and_again(
    is_of_call: bool, calls: range | list[int]
) -> None:
    port = Port(failure=Failure(Kind.UNREACHABLE, "x", is_of_call=is_of_call))
    assert hand_over(of_one_queue(30), port.of) == 0
    assert len(port.calls) in calls


def test_without_another_thread_nothing_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert hand_over(of_one_queue(1), Port().of) == 0

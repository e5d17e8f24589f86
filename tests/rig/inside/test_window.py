"""The prefetch window, which decides how many messages a worker asks SQS for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.worker.window import MAX_BLOCKED, Load, Throughput

from . import a_window

URL = "https://sqs.example/1/q"


@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        pytest.param(Load(2, 4), 8, id="an idle worker asks for its window"),
        pytest.param(Load(2, 4, held=8), 0, id="a full window asks for nothing"),
        pytest.param(Load(2, 4, held=3), 0, id="a message waits, and a batch is not worth a call"),
        pytest.param(Load(2, 4, held=2), 6, id="none waits"),
        pytest.param(Load(2, 32), 10, id="no more than SQS's batch"),
        pytest.param(Load(2, 32, held=54), 10, id="a full batch is missing"),
        pytest.param(Load(2, 4, expected=8), 0, id="what is under way counts"),
        pytest.param(Load(2, 1, held=1), 1, id="multiplier 1: one process is free"),
        pytest.param(Load(2, 1, held=2), 0, id="multiplier 1: none is free"),
        pytest.param(Load(2, 0, held=25_000), 10, id="multiplier 0: no limit"),
        pytest.param(Load(4, 1, held=1), 3, id="autoscale: processes that there could be count"),
        pytest.param(Load(2, 4, held=3, blocked=2), 7, id="FIFO: two wait for their group"),
        pytest.param(Load(1, 4, held=4, blocked=4), 4, id="-c1: only rate-limited messages wait"),
        pytest.param(Load(1, 1, held=1, blocked=1), 1, id="solo: one message waits for its time"),
        pytest.param(
            Load(1, 4, held=4 + MAX_BLOCKED, blocked=4 + MAX_BLOCKED), 0, id="blocked ones end too"
        ),
        pytest.param(
            Load(2, 4, held=8, settled_during_a_call=1_000), 10, id="short tasks are counted on"
        ),
        pytest.param(
            Load(2, 4, held=32, settled_during_a_call=1_000), 0, id="three windows ahead at most"
        ),
        pytest.param(
            Load(2, 1, held=2, settled_during_a_call=1_000), 0, id="multiplier 1 counts on nothing"
        ),
    ],
)
def test_wanted(load: Load, wanted: int) -> None:
    """The worker asks for as many messages as its window has room for, at most ten."""
    assert load.wanted == wanted


@given(
    processes=st.integers(0, 50),
    multiplier=st.integers(1, 40),
    held=st.integers(0, 3_000),
    blocked=st.integers(0, 3_000),
    expected=st.integers(0, 100),
)
def test_window_is_limit(
    processes: int, multiplier: int, held: int, blocked: int, expected: int
) -> None:
    """A worker holds at most a window of messages, and asks for more if a process is free.

    This holds as long as it does not expect that tasks end during a call.
    """
    blocked = min(blocked, held)
    load = Load(processes, multiplier, held=held, blocked=blocked, expected=expected)
    assert 0 <= load.wanted <= 10
    startable = held - blocked
    if load.wanted:
        assert startable + expected + load.wanted <= max(1, processes) * multiplier
    elif startable + expected < processes:
        assert held + expected >= load.window + MAX_BLOCKED - load.enough


@given(held=st.integers(0, 30), free=st.integers(1, 10))
def test_multiplier_of_one(held: int, free: int) -> None:
    """With a prefetch multiplier of 1, the worker asks for one message per free process."""
    assert Load(held + free, 1, held=held).wanted == min(10, free)


def work(
    throughput: Throughput, *, now: float, call: float, each: float, messages: int = 50
) -> float:
    """Report a full batch after ``call`` seconds, and its tasks, each of ``each`` seconds."""
    now += call
    throughput.responded(now, call, full=True)
    for left in reversed(range(messages)):
        now += each
        throughput.settled(now, more=left > 0)
    return now


def test_throughput_unknown() -> None:
    """Before its first measurement, the worker expects no task to end during a call."""
    assert Throughput().settled_within() == 0


@pytest.mark.parametrize(
    ("call", "each", "expected"),
    [(0.0151, 0.001, 15), (0.0151, 0.004, 3), (0.015, 0.1, 0), (0.3, 0.001, 300)],
)
def test_short_tasks(call: float, each: float, expected: int) -> None:
    """The worker measures how fast short tasks end, and expects as many to end during a call."""
    throughput = Throughput()
    work(throughput, now=1_000.0, call=call, each=each)
    assert throughput.settled_within() == pytest.approx(expected, abs=1)


def test_time_without_messages() -> None:
    """Time without messages does not count as time of tasks."""
    throughput, now = Throughput(), 1_000.0
    for _ in range(5):
        now = work(throughput, now=now, call=0.0201, each=0.001) + 3600
    assert throughput.settled_within() == 20


@pytest.mark.parametrize(("seconds", "full"), [(20.0, False), (7.0, True)])
def test_response_that_waited(seconds: float, full: bool) -> None:
    """A receive that waited for messages does not count in the time of a call."""
    throughput = Throughput()
    now = work(throughput, now=1_000.0, call=0.0201, each=0.001)
    throughput.responded(now + seconds, seconds, full=full)
    assert throughput.settled_within() == 20


def test_one_long_task() -> None:
    """After one long task, the worker expects no task to end during a call for a while."""
    throughput = Throughput()
    now = work(throughput, now=1_000.0, call=0.020, each=0.001)
    work(throughput, now=now, call=0.020, each=1.0, messages=1)
    assert throughput.settled_within() == 0


def test_clock_stands_still() -> None:
    """If tasks take no measurable time, the worker expects ten to end during a call."""
    throughput, now = Throughput(), itertools.repeat(5.0)
    throughput.responded(next(now), 0.1, full=True)
    throughput.settled(next(now), more=True)
    assert throughput.settled_within() == 10


def test_settlements_behind(caplog: pytest.LogCaptureFixture) -> None:
    """A worker stops receiving from a queue while SQS does not confirm 1,000 settlements of it.

    If this lasts, it logs the queue once. If it happens again, it logs the queue again.
    """
    waiting, now = [1_001], [0.0]
    window = a_window(1, 4, waiting_for=lambda url: waiting[0], clock=lambda: now[0])
    for start in (0.0, 100.0):
        waiting[0] = 1_001
        for now[0] in (start, start + 9.0):
            assert window.is_behind(URL)
        line = "sqs_backoff.settling_behind: queue q: SQS has not confirmed the deletes"
        logged = caplog.text.count(line)
        assert logged == start / 100.0
        for now[0] in (start + 10.0, start + 11.0):
            assert window.is_behind(URL)
        waiting[0] = 1_000
        assert not window.is_behind(URL)
    assert caplog.text.count("sqs_backoff.settling_behind") == 2

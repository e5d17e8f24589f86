"""Workers keep the rules of ``fleet.py`` in random histories of faults, kills and stops.

Hypothesis draws the histories, and makes one that fails shorter. ``make simulate-faults
HISTORIES=20000`` runs more of them.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fleet import TROUBLE_SECONDS, Down, Fault, Fleet, History, Kill, Queue, Send, Stop, Suspend

HISTORIES = int(os.environ.get("SIMULATED_HISTORIES", "60"))

ACTIONS = ("ChangeMessageVisibilityBatch", "DeleteMessageBatch", "SendMessageBatch")
ERRORS = (
    "unreachable",
    "lost answer",
    "RequestThrottled",
    "InternalError",
    "ExpiredToken",
    "AccessDenied",
    "entries",
    "slow",
)

times = st.integers(0, int(TROUBLE_SECONDS * 4)).map(lambda quarter: quarter / 4)
queues = st.builds(
    Queue,
    fifo=st.sampled_from((False, False, True)),
    visibility_timeout=st.sampled_from((30, 9, 120)),
    max_receive_count=st.sampled_from((1_000, 1_000, 5)),
)
ends = st.tuples(
    st.sampled_from(("retry", "retry", "retry", "give up", "crash")),
    st.sampled_from((0.05, 2.0, 70.0)),
)
sends = st.builds(
    Send,
    at=times,
    queue=st.integers(0, 1),
    group=st.sampled_from("xyz"),
    runs=st.lists(ends, max_size=3).map(tuple),
    count=st.sampled_from((1, 1, 2, 5)),
    seconds=st.sampled_from((0.05, 0.05, 3.0, 50.0)),
)
faults = st.builds(
    Fault,
    at=times,
    seconds=st.sampled_from((1.0, 3.0, 40.0, 150.0)),
    queue=st.integers(0, 1),
    action=st.sampled_from(ACTIONS),
    error=st.sampled_from(ERRORS),
)
kills = st.builds(Kill, at=times, worker=st.integers(0, 1))
stops = st.builds(Stop, at=times, worker=st.integers(0, 1))
suspensions = st.builds(
    Suspend, at=times, worker=st.integers(0, 1), seconds=st.sampled_from((5.0, 50.0, 400.0))
)
downs = st.builds(
    Down,
    at=times,
    seconds=st.sampled_from((8.0, 20.0, 60.0, 120.0)),
    retry_after=st.sampled_from((None, None, 15.0, 90.0)),
)


@st.composite
def histories(draw, *, has_provider=False):
    steps = draw(st.lists(sends, min_size=1, max_size=8))
    steps += draw(st.lists(faults, max_size=4))
    steps += draw(st.lists(kills | stops | suspensions, max_size=2))
    if has_provider:
        steps += draw(st.lists(downs, min_size=1, max_size=2))
    both = (draw(queues), draw(queues))
    return History(both, tuple(sorted(steps, key=lambda step: step.at)), has_provider)


_SETTINGS = settings(
    max_examples=HISTORIES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.timeout(3600 * 4 if HISTORIES > 1000 else 600)
@_SETTINGS
@given(histories())
def test_histories(history):
    """Workers keep the rules whichever calls fail, and whichever worker is killed or suspended."""
    assert Fleet(history).run().wrong == []


@pytest.mark.timeout(3600 * 4 if HISTORIES > 1000 else 600)
@_SETTINGS
@given(histories(has_provider=True))
def test_histories_with_provider(history):
    """Workers also keep the rules while the provider of their tasks is down, and afterwards."""
    assert Fleet(history).run().wrong == []


@pytest.mark.parametrize("error", ["unreachable", "AccessDenied", "slow"])
def test_faults_of_one_queue(error):
    """If calls about one queue fail, the worker does not hold up the messages of another queue."""
    both = (Queue(), Queue())
    sent = [Send(float(at), queue) for at in range(60) for queue in (0, 1)]
    failing = [Fault(5.0, 50.0, 0, action, error) for action in ACTIONS[:2]]
    assert Fleet(History(both, (*sent, *failing))).run().wrong == []


def test_replay():
    """A history that runs twice gives the same calls and runs."""
    both = (Queue(), Queue(fifo=True))
    sent = [Send(float(at), at % 2, runs=(("retry", 0.05),)) for at in range(20)]
    history = History(both, (*sent, Kill(7.0, 0), Suspend(12.0, 1, 50.0)))
    first, second = Fleet(history).run(), Fleet(history).run()
    assert (first.runs, len(first.rig.calls())) == (second.runs, len(second.rig.calls()))
    assert first.extra_runs == second.extra_runs

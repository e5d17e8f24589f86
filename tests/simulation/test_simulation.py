"""Histories of two workers, two queues and SQS, with faults: 800, and 300 with a provider."""

from __future__ import annotations

import os

import pytest

from .history import Down, Fault, History, QueueSpec, Send, draw, draw_with_provider
from .mutations import applied
from .provider_mutations import MUTATIONS as PROVIDER_MUTATIONS
from .search import first_failure, reduced
from .world import run

#: A quarter per test, so that a run that is cut off has said something.
HISTORIES = int(os.environ.get("SIMULATED_HISTORIES", "800"))
PARTS = 4
PROVIDER_HISTORIES = int(os.environ.get("SIMULATED_PROVIDER_HISTORIES", "300"))


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_wrong_in_any_history(part):
    """A history that fails prints itself as a script that replays it."""
    each = HISTORIES // PARTS
    seeds = range(part * each, (part + 1) * each)
    failure = first_failure(seeds)
    if failure is not None:
        seed, history, wrong = failure
        pytest.fail(f"seed {seed}: {wrong[:3]}\n{reduced(history).script()}")


def test_nothing_is_wrong_while_a_provider_is_down_and_when_it_is_back():
    """Workers are killed at any point of a recall, and calls fail; see ``provider``."""
    failure = first_failure(range(PROVIDER_HISTORIES), draw_with_provider)
    if failure is not None:
        seed, history, wrong = failure
        pytest.fail(f"seed {seed}: {wrong[:3]}\n{reduced(history).script()}")


def test_histories_with_a_provider_have_outages_recalls_and_kills_in_recalls():
    judges = [run(draw_with_provider(seed)) for seed in range(60)]
    assert sum(judge.looks > 0 for judge in judges) > 20
    assert sum(judge.recalls for judge in judges) > 200
    assert sum(judge.recall_kills for judge in judges) > 10
    assert sum(judge.stops for judge in judges) > 10


def test_a_hold_in_doubt_that_is_recalled_is_noticed():
    with PROVIDER_MUTATIONS["a hold in doubt is remembered"]():
        failure = first_failure(range(170, 400), draw_with_provider)
    assert failure is not None
    assert "in doubt" in failure[2][0]


def test_a_hold_that_has_ended_before_it_was_confirmed_is_not_recalled():
    """SQS is slow: a call that hides a message arrives when another worker has it."""
    one_run = (("success", 0.2, 0.0),)
    sends = [Send(80.58, 0, "z", one_run) for _ in range(4)]
    sends.insert(1, Send(80.58, 0, "y", (("retry", 0.05, 200.0), ("success", 2.0, 0.0))))
    downs = (Down(61.53, 30.0, 3.0), Down(82.8, 120.0))
    slow = Fault(84.02, 40.0, 0, "ChangeMessageVisibilityBatch", "slow")
    queues = (QueueSpec("a", visibility_timeout=9), QueueSpec("b"))
    assert run(History(queues, (*sends, *downs, slow), has_provider=True)).wrong == []


def test_a_history_is_the_same_each_time():
    for draw_one in (draw, draw_with_provider):
        first, second = run(draw_one(3)), run(draw_one(3))
        assert (first.runs, first.sim.calls) == (second.runs, second.sim.calls)


def test_a_failing_history_is_reduced_and_its_script_replays_it():
    with applied("a failed delete is dropped"):
        failure = first_failure(range(200))
        assert failure is not None
        smaller = reduced(failure[1])
        assert len(smaller.steps) < len(failure[1].steps)
        names: dict[str, object] = {}
        exec(smaller.script().replace("print(", "wrong = (").replace("import *", _NAMES), names)
        assert names["wrong"]


_NAMES = "import " + ", ".join(["Fault", "History", "Kill", "QueueSpec", "Send", "Stall"])


@pytest.mark.parametrize("how", ["unreachable", "denied", "slow"])
def test_a_queue_with_faults_leaves_the_other_alone(how):
    queues = (QueueSpec("a"), QueueSpec("b"))
    sends = [Send(t, queue, "x", (("success", 0.05, 0.0),)) for t in range(60) for queue in (0, 1)]
    faults = [
        Fault(5, 50, 0, action, how)
        for action in ("ChangeMessageVisibilityBatch", "DeleteMessageBatch")
    ]
    assert run(History(queues, (*sends, *faults))).wrong == []

"""Guards, steps and workflows in random histories: the short form of ``make simulate-safe``."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress

import pytest

from . import workflow
from .safe import KINDS, WORKFLOW, World, simulate
from .workflow_mutations import MUTATIONS, mutated

#: How many histories of each kind run, and how many run in one test. A test has few histories,
#: because ``make mutants`` leaves slow tests out.
HISTORIES, AT_A_TIME = {"guard": 150, "step": 120, "workflow": 100}, 10


@pytest.mark.parametrize(
    ("kind", "seed"),
    [(kind, seed) for kind in (*KINDS, WORKFLOW) for seed in range(0, HISTORIES[kind], AT_A_TIME)],
)
def test_random_kills(kind: str, seed: int) -> None:
    """Guards, steps and workflows keep their promises at whichever line a process is killed."""
    happened = simulate(kind, histories=AT_A_TIME, seed=seed)
    assert happened["killed"]


def test_no_exception_left() -> None:
    """A simulated kill leaves no exception in ``sys.exc_info()``.

    CPython could keep an exception that was leaving a ``with`` block when the kill came.
    """
    source = "def leave():\n  with nullcontext():\n    raise ValueError"
    names = {"nullcontext": nullcontext}
    exec(compile(source, "celery_sqs_backoff/safe/leaving.py", "exec"), names)
    world = World()
    world.lines = 4
    for _ in range(30):
        with suppress(ValueError):
            world.attempt(names["leave"])
    assert world.effects["killed"] > 5
    assert sys.exc_info() == (None, None, None)


@pytest.mark.parametrize("name", MUTATIONS)
def test_missing_rules(name: str) -> None:
    """These 200 histories are enough to notice that a rule of workflows is missing."""
    with mutated(name):
        assert any(is_broken(seed) for seed in range(200, 400))


def is_broken(seed: int) -> bool:
    try:
        workflow.play(seed)
    except workflow.Broken:
        return True
    return False

"""Draw the behaviour of each task of a chaos run."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Behaviour = Literal["succeed", "retry", "fail", "crash"]

#: How many of a hundred tasks have this behaviour and this ``times`` (see ``Plan``). Tasks that
#: only succeed or fail do not use ``times``.
_SHARES: dict[tuple[Behaviour, int], int] = {
    ("succeed", 0): 62,
    ("retry", 1): 10,
    ("retry", 2): 6,
    ("retry", 3): 4,
    ("fail", 0): 8,
    ("crash", 1): 8,
    ("crash", 1_000_000): 2,  # until the worker gives the message up
}

#: How many of a hundred tasks take a time between these two numbers of seconds.
_SECONDS = {(0.0, 0.05): 84, (0.3, 1.0): 14, (3.0, 7.0): 2}


@dataclass(frozen=True)
class Plan:
    """The behaviour of one task. With ``retry`` and ``crash``, it succeeds after ``times`` runs."""

    task_id: str
    behaviour: Behaviour
    times: int
    seconds: float


def draw_plan(tasks: int, rng: Random) -> list[Plan]:
    """Draw the plans of this many tasks. A generator with the same seed gives the same plans."""
    kinds = rng.choices(list(_SHARES), list(_SHARES.values()), k=tasks)
    ranges = rng.choices(list(_SECONDS), list(_SECONDS.values()), k=tasks)
    return [
        Plan(f"chaos-{n:05}", behaviour, times, round(rng.uniform(*seconds), 3))
        for n, ((behaviour, times), seconds) in enumerate(zip(kinds, ranges, strict=True))
    ]

"""Runs many histories, and reduces one that fails to the steps it needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from .history import History, draw
from .world import run

__all__ = ["first_failure", "reduced"]


def first_failure(
    seeds: Iterable[int], draw: Callable[[int], History] = draw
) -> tuple[int, History, list[str]] | None:
    """Return the first history in which something is wrong: its seed, itself, what is wrong."""
    for seed in seeds:
        history = draw(seed)
        if wrong := run(history).wrong:
            return seed, history, wrong
    return None


def reduced(history: History, *, tries: int = 60) -> History:
    """Leave out steps as long as something is wrong all the same."""
    rng = random.Random(0)
    for _ in range(tries):
        if len(history.steps) < 2:
            break
        left_out = rng.randrange(len(history.steps))
        fewer = tuple(step for i, step in enumerate(history.steps) if i != left_out)
        smaller = replace(history, steps=fewer)
        if run(smaller).wrong:
            history = smaller
    return history

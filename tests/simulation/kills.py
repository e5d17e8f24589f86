"""A process that ends at any line, and the store that it shares with others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import CodeType, FrameType
from typing import Any, Protocol

from celery_sqs_backoff.safe import StoreUnavailable
from celery_sqs_backoff.store.memory import MemoryStore


class Killed(BaseException):
    """The process has ended. Nothing of it runs any more."""


class Mortal(Protocol):
    """What a simulated world says of its process and its store."""

    rng: Random
    #: The process has ended.
    is_dead: bool
    #: Share of the store's calls that fail.
    store_fails: float


class MortalStore(MemoryStore):
    """A process that has ended writes nothing any more, whatever its ``finally`` blocks say.

    And a store that is reached over a network: a call may be lost, or its answer.
    """

    world: Mortal

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in ("add", "get", "replace", "delete"):
            return method
        world = self.world
        if world.is_dead:
            raise Killed
        if world.rng.random() >= world.store_fails:
            return method

        def failing(*args: Any) -> None:
            if world.rng.random() < 0.5:
                method(*args)
            raise StoreUnavailable("simulated")

        return failing


def killed_after(
    lines: int, world: Mortal, act: Callable[[], Any], *, where: Callable[[CodeType], bool]
) -> Any:
    """Return what ``act`` returns, unless its process ends first.

    Arguments:
        lines: after which it ends; 0: it does not.
        where: returns whether lines of a function count.

    Raises:
        Killed: it has ended.
    """
    world.is_dead = False
    try:
        with _traced(lines, world, where):
            return next(_alone(act))
    finally:
        world.is_dead = False


def _alone(act: Callable[[], Any]) -> Iterator[Any]:
    """Do something in a generator, because that has its own exception being handled.

    A trace function that raises while an exception leaves a ``with`` block makes CPython 3.11 to
    3.13 keep that exception as the one being handled, because the clean-up of the block's handler
    runs before its set-up has. Signals are looked at elsewhere, so no real process does this.
    """
    yield act()


@contextmanager
def _traced(lines: int, world: Mortal, where: Callable[[CodeType], bool]) -> Iterator[None]:
    left = lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not where(frame.f_code):
            return None  # A store's change is atomic.
        if event == "line":
            left -= 1
            if left == 0:
                world.is_dead = True
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace if lines else None)
    try:
        yield
    finally:
        sys.settrace(before)

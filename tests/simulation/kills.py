"""Simulate a process that is killed at any line, and the store that it shares with others."""

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
    """The process was killed, so none of its code runs any more."""


class Mortal(Protocol):
    """A simulated world with a process and a store."""

    rng: Random
    #: Whether the process was killed.
    is_dead: bool
    #: The share of the store's calls that fail.
    store_fails: float


class MortalStore(MemoryStore):
    """A store that takes no calls from a process that was killed.

    So ``finally`` blocks of the process have no effect, as after a real SIGKILL. Calls can also
    fail as they do over a network. Either the call gets lost, or the store carries it out and the
    response gets lost.
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
    """Call ``act`` in a simulated process and return its result, unless the process is killed.

    Arguments:
        lines: after how many lines of code the process is killed; 0 means never.
        where: returns whether the lines of a function count.

    Raises:
        Killed: the process was killed.
    """
    world.is_dead = False
    try:
        with _traced(lines, world, where):
            return next(_alone(act))
    finally:
        world.is_dead = False


def _alone(act: Callable[[], Any]) -> Iterator[Any]:
    """Do something in a generator, so that an exception cannot stay behind in ``sys.exc_info()``.

    A trace function may raise while an exception leaves a ``with`` block. CPython 3.11 to 3.13 then
    goes on as if that exception were still being handled. A generator has an ``exc_info`` of its
    own, which ends with the generator. A real process cannot get into this state, because Python
    does not look at signals at this point.
    """
    yield act()


@contextmanager
def _traced(lines: int, world: Mortal, where: Callable[[CodeType], bool]) -> Iterator[None]:
    left = lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not where(frame.f_code):
            return None  # For example, a process is never killed inside a change of the store.
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

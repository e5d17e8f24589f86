"""Whose record is it? The message that is being run in this thread, greenlet or coroutine."""

from __future__ import annotations

import time
from collections import defaultdict
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from .errors import OutsideRun
from .guard import Passage


@dataclass
class RunState:
    """What the safe parts know of one run of a message, or of a call outside any message."""

    task: Any = None
    request: Any = None
    run: str = field(default_factory=lambda: uuid4().hex)
    began: float = field(default_factory=time.time)
    #: How the run has passed the task's guard, and the record of runs of a task with ``undo``.
    guard: Passage | None = None
    record: Passage | None = None
    #: Steps that were done, or are in doubt.
    acts: int = 0
    #: Names of the locks that the run holds.
    held: set[str] = field(default_factory=set)
    #: Names of the steps that the run has had, by scope.
    used: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def note_act(self) -> None:
        """Note that a step has been done, or may have been."""
        self.acts += 1

    @property
    def message(self) -> tuple[str, str]:
        """The task's name and the message's task ID: the same on every attempt."""
        return str(self.task.name), str(self.request.id)


_CURRENT: ContextVar[RunState | None] = ContextVar("celery_sqs_backoff_safe", default=None)


def begin(task: Any) -> RunState:
    """Note that a run of a message begins."""
    request = task.request
    state = RunState(task, request, getattr(request, "sqs_run_id", None) or uuid4().hex)
    request.sqs_safe = state
    _CURRENT.set(state)
    return state


def state_of(request: Any) -> RunState | None:
    """Return what is known of the run of a message, during and after it."""
    return getattr(request, "sqs_safe", None)


def current() -> RunState | None:
    """Return the run of the message that is running here, whichever task is asking."""
    state = _CURRENT.get()
    is_running = state is not None and getattr(state.request, "sqs_is_running", False)
    return state if is_running else None


def message_of(task: Any) -> tuple[str, str]:
    """Return the task's name and the task ID of the message that it is running.

    Raises:
        OutsideRun: none is running, or the task is called as a function.
    """
    state = current()
    if state is None or state.task.name != task.name or task.request.called_directly:
        raise OutsideRun(
            f"{task.name} is not running for a message, so nothing says whose record this would be:"
            " name it with scope="
        )
    return state.message

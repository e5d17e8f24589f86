"""Find the message for which a task is running in this thread, greenlet or coroutine.

A step without a ``scope`` belongs to this message.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from uuid import uuid4

from ..task.handover import RUNNING, Run
from .errors import OutsideRun
from .guard import Passage


@dataclass
class RunState:
    """Facts about one run of a message, or of a call outside any message."""

    task: Any = None
    task_id: str = ""
    #: The run; ``None`` = a call outside any message.
    of: Run | None = None
    #: The record of the task's guard; ``None`` = no guard.
    guard: Passage | None = None
    #: The record of the message's runs. ``None`` = the task has no ``on_not_processed``, or the app
    #: has no store.
    record: Passage | None = None
    #: Number of steps that were done, or may have been done.
    acts: int = 0
    #: Names of the locks that the run holds.
    held: set[str] = field(default_factory=set)
    #: Names of the steps that the run has finished or skipped, by kind and name of their record.
    used: defaultdict[str, set[str]] = field(default_factory=partial(defaultdict, set))

    @cached_property
    def run(self) -> str:
        """ID of the run. It is made on first access, because making it is slow."""
        return uuid4().hex if self.of is None else self.of.id

    @property
    def message(self) -> tuple[str, str]:
        """Task name and task ID of the message. They are the same on every attempt."""
        return str(self.task.name), self.task_id


def current() -> RunState | None:
    """Return the state of the run that is under way here, or ``None`` if no message is running.

    If the message's task calls another task as a function, the state stays the same.
    """
    run = RUNNING.get()
    if run is None or not run.is_running:
        return None
    if run.extension_state is None:  # made at its first use, because few tasks need it
        run.extension_state = RunState(run.task, str(run.task_id), run)
    state: RunState = run.extension_state
    return state


def message_of(task: Any) -> tuple[str, str]:
    """Return the task's name, and the task ID of the message that the task is running.

    Raises:
        OutsideRun: no message is running, or the task was called as a function.
    """
    state = current()
    if state is None or state.task.name != task.name or task.request.called_directly:
        raise OutsideRun(
            f"{task.name} is not running for a message, so the record would have no owner: name"
            " the owner with scope="
        )
    return state.message

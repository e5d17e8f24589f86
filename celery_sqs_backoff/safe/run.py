"""The message that runs in this thread, greenlet or coroutine, to which its records belong."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from uuid import uuid4

from ..task.handover import RUNNING, Run, run_of
from .errors import OutsideRun
from .guard import Passage


@dataclass
class RunState:
    """Facts about one run of a message, or of a call outside any message."""

    task: Any = None
    task_id: str = ""
    #: The run; ``None``: a call outside any message.
    of: Run | None = None
    #: How the run has passed the task's guard, and the record of its runs if the task has
    #: ``on_not_processed``.
    guard: Passage | None = None
    record: Passage | None = None
    #: Steps that were done, or are in doubt.
    acts: int = 0
    #: Names of the locks that the run holds.
    held: set[str] = field(default_factory=set)
    #: Names of the steps that the run has had, by scope.
    used: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @cached_property
    def run(self) -> str:
        """ID of the run. To make it takes longer than all else that begins a run."""
        return uuid4().hex if self.of is None else self.of.id

    def note_act(self) -> None:
        """Note that a step has been done, or may have been."""
        self.acts += 1

    @property
    def message(self) -> tuple[str, str]:
        """Name of the task and task ID of the message, the same on every attempt."""
        return str(self.task.name), self.task_id


def begin(task: Any) -> RunState:
    """Note that a run of a message begins."""
    run = RUNNING.get()
    assert run is not None  # the task's machinery calls this
    run.extension_state = state = RunState(task, str(task.request.id), run)
    return state


def state_of(request: Any) -> RunState | None:
    """Return the facts about the run of a message, during and after it."""
    run = run_of(request)
    return None if run is None else run.extension_state


def current() -> RunState | None:
    """Return the run of the message that is running here, also if another task asks."""
    run = RUNNING.get()
    return run.extension_state if run is not None and run.is_running else None


def message_of(task: Any) -> tuple[str, str]:
    """Return the task's name and the task ID of the message that it is running.

    Raises:
        OutsideRun: it has no message, or the task is called as a function.
    """
    state = current()
    if state is None or state.task.name != task.name or task.request.called_directly:
        raise OutsideRun(
            f"{task.name} is not running for a message, so nothing says whose record this would be:"
            " name it with scope="
        )
    return state.message

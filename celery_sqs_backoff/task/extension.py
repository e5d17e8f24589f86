"""The four hooks by which ``safe`` takes part in a run of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..retry.outcomes import Verdict


class Answered(Exception):
    """Raised in place of a run, or in it, to end the message with a result.

    Attributes:
        result: of the message.
        is_done: an earlier run of the message has ended well, and ``result`` is its result.
        has_result: ``result`` is that run's own. If not, it only says why there is none.
    """

    result: Any = None
    is_done = has_result = False


class Extension:
    """The hooks around a run. These do nothing.

    The first three run in the process that runs the task, ``given_up`` in the process that settles
    the message.
    """

    def before_run(self, task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Prepare the run of a message, or raise :class:`Answered` in its place."""

    def after_run(self, task: Any, result: object) -> None:
        """Note that a run has ended well. Never raises."""

    def run_failed(self, task: Any, exc: BaseException, verdict: Verdict) -> Verdict:
        """Note that a run has failed, and return what the failure means for the message."""
        return verdict

    def given_up(
        self, task: Any, task_id: str, *, run: str | None, began: float, queue: str | None = None
    ) -> bool:
        """Return whether everything was done that a message which is given up leaves behind.

        Arguments:
            run, began: ID of the run that gives it up, and when that began or was received, in
                seconds since the epoch.
            queue: that the message came from.

        Returns:
            False if it could not be done now.
        """
        return True

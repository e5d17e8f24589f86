"""The five hooks through which ``celery_sqs_backoff.safe`` extends a run of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..retry.outcomes import Verdict


class Answered(Exception):
    """Raised to end a run, because an earlier run has done the work or another message does it.

    Attributes:
        result: the value to store as the task's result.
        is_done: whether an earlier run of the message succeeded.
        has_result: whether ``result`` is the result of that earlier run. If not, ``result`` says
            why there is no result.
    """

    result: Any = None
    is_done = has_result = False


class Extension:
    """The hooks around a run. In this base class they do nothing.

    All but the last run in the process that runs the task. ``given_up`` runs in the process that
    gives the message up, which is mostly the worker's main process.
    """

    def before_run(self, task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Prepare the run of a message, or raise :class:`Answered` to skip the task's work."""

    def after_run(self, task: Any, result: object) -> None:
        """Handle the success of a run. Never raises."""

    def run_failed(self, task: Any, exc: BaseException, verdict: Verdict) -> Verdict:
        """Handle the failure of a run, and return the final verdict on it.

        The hook is also called if the task has raised ``Ignore``, ``Reject`` or ``Retry``.
        """
        return verdict

    def refused(self, task: Any, run: Any) -> None:
        """Clean up after a message that ends because another message does its work.

        Raises:
            Exception: the cleanup has failed and must be done later, so the run fails.
        """

    def given_up(
        self, task: Any, task_id: str, *, run: str | None, began: float, queue: str | None = None
    ) -> bool:
        """Clean up after a message that is given up, and return whether that succeeded.

        Arguments:
            run: the ID of the run that gives the message up; ``None`` if it is not known.
            began: when that run began or its message was received, in seconds since the epoch.
            queue: the name of the queue that the message came from, or ``None``.

        Returns:
            False if the cleanup has failed and must be done later.
        """
        return True

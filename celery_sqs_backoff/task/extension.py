"""The four hooks through which ``celery_sqs_backoff.safe`` extends a run of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..retry.outcomes import Verdict


class Answered(Exception):
    """Raised before or during a run to end the message without the result of this run.

    Attributes:
        result: the message's result.
        is_done: whether an earlier run of the message succeeded.
        has_result: whether ``result`` is the result of that earlier run. If not, ``result`` says
            why there is no result.
    """

    result: Any = None
    is_done = has_result = False


class Extension:
    """The hooks around a run. The base class leaves them empty.

    The first three run in the process that runs the task, ``given_up`` in the process that settles
    the message.
    """

    def before_run(self, task: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Prepare the run of a message, or raise :class:`Answered` to end it without a run."""

    def after_run(self, task: Any, result: object) -> None:
        """Note that a run has succeeded. Never raises."""

    def run_failed(self, task: Any, exc: BaseException, verdict: Verdict) -> Verdict:
        """Note that a run has failed, and return the verdict on the message.

        The hook is also called if the task has raised ``Ignore``, ``Reject`` or ``Retry``.
        """
        return verdict

    def given_up(
        self, task: Any, task_id: str, *, run: str | None, began: float, queue: str | None = None
    ) -> bool:
        """Clean up after a message that is given up, and return whether that succeeded.

        Arguments:
            run: the ID of the run that gives the message up; ``None`` if it is not known.
            began: when that run began or its message was received, in seconds since the epoch.
            queue: the name of the queue that the message came from, or ``None``.

        Returns:
            False if the cleanup could not be done now.
        """
        return True

"""The end of a message that is not run, because a guard has refused it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import celery.app.task as celery_task
from celery.app.task import Context
from celery.utils.log import get_task_logger

from ..text import error_site, printable
from .extension import Answered

logger = get_task_logger(__name__)


def is_awaited(task: Any, answer: Answered) -> bool:
    """Return whether what follows the task waits for a result that could not be kept.

    The run that was done may have ended before it handed the result on; nobody can now.
    """
    request, is_lost = task.request, answer.is_done and not answer.has_result
    return is_lost and bool(request.chain or request.callbacks or request.chord)


def end_refused(task: Any, refused: Answered) -> Exception | None:
    """Store why the message was refused, which ends its chain there. Does not raise.

    Returns:
        what kept a chord from going on that waits for the message, or for its chain.
    """
    request = task.request
    logger.info(
        "sqs_backoff.refused: %s[%s] ends without a run: %s",
        *(printable(task.name), printable(request.id), refused),
    )
    if request.is_eager:
        return None
    is_stored = not ignores_result(task, request)
    members = list(_chord_members(request.chain))
    try:
        # Not stored, it is still a member of its chord.
        task.backend.mark_as_done(
            request.id, refused.result, request=request, store_result=is_stored
        )
        for follower in members:
            task.backend.mark_as_done(follower.id, refused.result, request=follower)
    except Exception as exc:  # noqa: BLE001  # whatever the result backend's library raises
        logger.error("sqs_backoff.refusal_not_stored: %s", error_site(exc))
        return exc if request.chord or members else None
    return None


def _chord_members(rest: Any) -> Iterator[Context]:
    """The tasks of the rest of a chain that a chord waits for, as requests.

    As ``celery.backends.base.Backend._fail_chain`` has it.
    """
    waiting = list(rest or ())
    while waiting:
        follower = Context(waiting.pop(0))
        options = follower.options or {}
        follower.update(options)
        follower.id, follower.group = options.get("task_id"), options.get("group_id")
        if follower.chord is not None and follower.id is not None:
            yield follower
        body = (follower.kwargs or {}).get("body")
        if getattr(follower, "subtask_type", None) == "chord" and body is not None:
            waiting.append(body)  # what waits for that chord waits for its body


def ignores_result(task: Any, request: Any) -> bool:
    """Whether Celery will store no result."""
    celerys_own = getattr(celery_task, "get_actual_ignore_result", None)  # Celery 5.7
    if celerys_own is not None:
        return bool(celerys_own(task, request))
    return bool(task.ignore_result or request.ignore_result)

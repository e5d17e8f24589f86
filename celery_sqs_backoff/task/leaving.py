"""Which exceptions end more than a task: a process, or what a pool started for the task."""

from __future__ import annotations

import sys
from typing import Any

from billiard.process import current_process
from celery.exceptions import WorkerShutdown, WorkerTerminate


def ends_the_process(exc: BaseException) -> bool:
    """Whether the exit is the worker's own, or ends a child process of the prefork pool."""
    if isinstance(exc, WorkerShutdown | WorkerTerminate):
        return True
    return isinstance(exc, SystemExit | KeyboardInterrupt) and _is_pool_child()


def is_pools_time_limit(exc: BaseException, task: Any, timelimit: Any) -> bool:
    """Whether gevent's pool has raised this for the hard time limit, in the task's greenlet.

    The pool must see it again: it reports the time limit to the main process. A task's own
    ``gevent.Timeout`` with exactly the same number of seconds cannot be told from it.

    Arguments:
        timelimit: the message's header: hard and soft limit, or nothing.
    """
    gevent = sys.modules.get("gevent")
    if gevent is None or not isinstance(exc, gevent.Timeout):
        return False
    limit = (timelimit or (None,))[0] or task.time_limit
    return limit is not None and exc.seconds == limit


def _is_pool_child() -> bool:
    is_child: bool = current_process()._parent_pid is not None
    return is_child

"""The task's own code is called, and its end is judged: ``run``, and a ``__call__`` around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from inspect import Parameter, getattr_static, signature
from typing import Any, Final

from celery import Task
from celery._state import _task_stack
from celery.exceptions import Ignore

from ..retry.budget import GiveUpReason
from ..retry.decision import End, Ended, GiveUp
from ..retry.outcomes import Outcome
from .extension import Answered
from .failed_run import FailedRun
from .handover import Report, Run, begun_run_of, describe
from .refused import end_refused, is_awaited
from .tracing import note_end

RETURNED: Final = Report(Ended(End.RETURNED))

#: Of a request whose task has a ``__call__`` of its own, where the run is judged: the request
#: itself. ``Task.__call__`` gives ``run`` a copy.
_IN_CALL: Final = "sqs_in_call"


def wrap_run(cls: Any) -> None:
    """Wrap a task's ``run``, once. (A ``__call__`` would cost every run several times as much.)"""
    run = cls.run
    if getattr(run, "_is_wrapped", False):
        return
    given = getattr_static(cls, "run")
    takes_self = not isinstance(given, staticmethod | classmethod)

    @wraps(run)
    def wrapped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        # A classmethod's class is the task's own, not that from which it inherits ``run``.
        call = partial(run, self) if takes_self else given.__get__(None, type(self))
        request = self.request_stack.top
        judged = getattr(request, _IN_CALL, None)
        if judged is not None:
            return _run_in_call(self, judged, partial(call, *args, **kwargs))
        if request is not None and _is_running(request) and type(self).run is not wrapped:
            return call(*args, **kwargs)  # by ``super().run()``, in a task that inherits from it
        return _judged(self, request, call, args, kwargs)

    wrapped._is_wrapped = True  # type: ignore[attr-defined]
    if not takes_self:
        _sign_with_self(wrapped)
    cls.run = wrapped


def wrap_call(cls: Any) -> None:
    """Take a ``__call__`` of the task's own for a part of its run, once.

    Celery calls it, and it calls ``run``: in a transaction, for example, whose commit may fail.
    """
    call = cls.__call__
    if call is Task.__call__ or getattr(call, "_is_wrapped", False):
        return

    @wraps(call)
    def wrapped(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        request = self.request_stack.top
        if request is None or request.called_directly or request.is_eager or _is_running(request):
            return call(self, *args, **kwargs)
        vars(request)[_IN_CALL] = request
        try:
            return _judged(self, request, partial(call, self), args, kwargs)
        finally:
            del vars(request)[_IN_CALL]

    wrapped._is_wrapped = True  # type: ignore[attr-defined]
    cls.__call__ = wrapped


def _run_in_call(task: Any, request: Any, run: Callable[[], Any]) -> Any:
    """Call ``run`` with the request that is judged: what it notes there (steps) counts then."""
    del vars(request)[_IN_CALL]  # a task that calls itself is called as a function
    task.request_stack.push(request)
    try:
        return run()
    finally:
        task.request_stack.pop()
        vars(request)[_IN_CALL] = request


def _judged(
    task: Any, request: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the task's own code, and say how the run has ended."""
    running = None if request is None else begun_run_of(request)
    if running is not None:
        running.has_begun = True
    if request is not None:
        if _is_running(request):
            return _called_by_itself(task, args, kwargs)
        request.sqs_is_running = True
    try:
        if task.request.called_directly:  # no message's: nothing is guarded, ended or given up
            return call(*args, **kwargs)
        return _ended(task, running, call, args, kwargs)
    finally:
        if request is not None:
            request.sqs_is_running = False


def _ended(
    task: Any, running: Run | None, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Return what the run returns, or raise what becomes of its failure."""
    try:
        task.extension.before_run(task, args, kwargs)
        result = call(*args, **kwargs)
        task.extension.after_run(task, result)
    except Answered as answer:
        result = _answered(task, running, answer, args, kwargs)
    except BaseException as exc:
        instead = FailedRun(task, exc, args, kwargs).instead()
        if instead is None:
            raise
        raise instead from exc
    if running is not None:
        running.report = RETURNED
        note_end(running, attempt=task.request.retries + 1)
    return result


def _answered(task: Any, running: Run | None, answer: Answered, args: Any, kwargs: Any) -> Any:
    """Return the result of an earlier run, or end the message without a result of its own."""
    if is_awaited(task, answer):
        raise FailedRun(task, answer, args, kwargs).instead() or answer from None
    if answer.has_result:
        return answer.result
    if not answer.is_done:  # an earlier run may have done something before the guard's window ended
        request = task.request
        run, began = getattr(request, "sqs_run_id", None), time.time()
        task.extension.given_up(task, request.id, run=run, began=began)
    unsent = end_refused(task, answer)
    if unsent is not None and running is not None:
        word = GiveUp(GiveUpReason.NOT_HANDED_ON, Outcome.UNKNOWN)
        error = describe(unsent, task.backoff_options)
        running.report = Report(Ended(End.IGNORED, word), error)
    raise Ignore(answer.result) from None


def _is_running(request: Any) -> bool:
    """Return whether the task's own code is running for the message of this request."""
    return request.id is not None and getattr(request, "sqs_is_running", False)


def _sign_with_self(wrapped: Any) -> None:
    """Let the signature of a bound method be that of the function that takes no ``self``.

    Else its first argument would pass for ``self``.
    """
    with suppress(TypeError, ValueError):  # one that does not say
        plain = signature(wrapped)
        first = Parameter("self", Parameter.POSITIONAL_ONLY)
        wrapped.__signature__ = plain.replace(parameters=[first, *plain.parameters.values()])


def _called_by_itself(task: Any, args: Any, kwargs: Any) -> Any:
    """Run a task that calls itself as a function, as one that calls another.

    For that call Celery uses the message's own request, or a copy of it with the same id
    (``Task.push_request``), so it would pass for the message: its failure, its guard, its keys.
    """
    _task_stack.push(task)
    task.push_request(args=args, kwargs=kwargs, id=None, called_directly=True)
    try:
        return task.run(*args, **kwargs)
    finally:
        task.pop_request()
        _task_stack.pop()

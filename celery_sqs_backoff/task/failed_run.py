"""A run that did not return: what that means, what is undone, and what to raise instead.

All of it happens in the process that ran the task, before Celery hears of the failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from celery import Task
from celery.exceptions import Reject, Retry, TaskPredicate, WorkerLostError
from celery.utils.log import get_task_logger

from ..retry.budget import GiveUpReason, Standing, exhausted
from ..retry.decision import End, Ended, GiveUp, Reply, RetryIn, Word, word_for
from ..retry.outcomes import (
    UNCLASSIFIED,
    NonRetryable,
    Outcome,
    Verdict,
    judge,
    known_verdict,
)
from ..sqs.visibility import standing, visibility_delay
from ..store.errors import SafeError
from ..text import error_site, printable, type_name
from .handover import BackoffRetry, Report, describe, ended_by, run_of
from .leaving import ends_the_process, is_pools_time_limit
from .retries import cause_of, drawn_delay, note_cause, publish_as, rejected_for
from .tracing import current_trace, note_end

logger = get_task_logger(__name__)

#: Header of a retry published to a broker other than SQS: seconds since the epoch of the first
#: failure. There is nothing else by which ``retry_for`` could be kept there.
FIRST_FAILED_AT = "sqs_backoff_first_failed_at"


class Aborted(BaseException):
    """Takes a ``MemoryError`` past Celery's own handling, which would store a FAILURE at once."""


class Final:
    """What ``self.retry()`` raised because no retry was left, and why.

    Arguments:
        cause: what the retry would have been for; ``None`` if the task has not said.
    """

    def __init__(
        self, failure: BaseException, reason: GiveUpReason, cause: BaseException | None
    ) -> None:
        self.failure = failure
        self.reason = reason
        self.cause = cause

    @staticmethod
    def of(request: Any, exc: BaseException) -> Final | None:
        """What ``self.retry()`` has raised, if it is this exception."""
        final: Final | None = getattr(request, "sqs_final", None)
        return final if final is not None and final.failure is exc else None


class FailedRun:
    """One failure of one run of a message.

    Arguments:
        task: the task, with its request still in place.
        exc: what its ``run`` raised.
        args, kwargs: what it was called with.
    """

    def __init__(self, task: Any, exc: BaseException, args: Any, kwargs: Any) -> None:
        self._task = task
        self._exc = exc
        self._arguments = (args, kwargs)
        self._request = task.request
        self._run = run_of(self._request)
        self._now = time.time()

    def instead(self) -> BaseException | None:
        """Decide, undo, note the word; return what to raise, or ``None`` = the exception itself."""
        exc = self._exc
        retried = _retried_for(self._task, exc) if self._run and _is_unpublished(exc) else None
        if retried is not None:
            return FailedRun(self._task, retried, *self._arguments).instead() or retried
        if isinstance(exc, TaskPredicate):
            return self._predicate(exc)
        if ends_the_process(exc) or is_pools_time_limit(exc, self._task, self._request.timelimit):
            return None
        if isinstance(exc, SystemExit) and self._run is None:
            return None  # another broker: as Celery does
        if isinstance(exc, SystemExit):
            # In the pools that share the worker's process it would end the worker (solo) or
            # leave the message stuck in it for good (threads, gevent: celery/concurrency/base.py).
            failure = WorkerLostError(f"The task called sys.exit({exc.code!r})")
            return self._judged(failure, judge_failure(self._task, failure)) or failure  # type: ignore[no-any-return]
        if isinstance(exc, Exception) and not (isinstance(exc, MemoryError) and self._run):
            return self._judged(exc, judge_failure(self._task, exc))
        return self._aborted(exc)

    def _predicate(self, exc: TaskPredicate) -> BaseException | None:
        """Retry, Ignore, Reject: the task says itself what is to become of it."""
        cause, reply = exc, None
        if isinstance(exc, Retry):
            cause, verdict = cause_of(exc) or exc, judge_failure(self._task, exc)
            reply = _reply(cause_of(exc), verdict)
            self._undo(cause, verdict)
        elif isinstance(exc, Reject):  # as a retry of what has been caught
            caught = rejected_for(exc)
            self._has_failed(caught or exc, _judge_retry(self._task, caught))
        self._note(replace(ended_by(exc), reply=reply), cause)
        return None

    def _aborted(self, exc: BaseException) -> BaseException | None:
        """Nobody knows how far the run got, unless one of the task's own rules does."""
        if self._run is None:
            return None  # another broker: Celery's own way
        options = self._task.backoff_options
        verdict = known_verdict(
            exc,
            classify=options.classify,
            retry_on=options.retry_on,
            never_retry=options.never_retry,
            task=self._task.name,
        )
        if verdict is not None:
            failure = exc if isinstance(exc, Exception) else _as_exception(exc)
            return self._judged(failure, verdict, cause=exc) or failure
        self._note(Ended(End.ABORTED), exc)
        return Aborted(type_name(exc)) if isinstance(exc, Exception) else None

    def _judged(
        self, exc: Exception, verdict: Verdict, *, cause: BaseException | None = None
    ) -> Retry | None:
        """Return the retry, or ``None`` if the task has failed."""
        final = Final.of(self._request, exc)
        reply = _reply(final.cause if final else exc, verdict)
        verdict = self._undo(exc, verdict)
        if self._run is None:
            retry = None if final else self._on_another_broker(exc, verdict)
            if retry is None:
                self._give_up()
            return retry
        word: Word = GiveUp(final.reason, verdict.outcome) if final else self._word(exc, verdict)
        self._note(Ended(End.RAISED, word, reply), cause or exc)
        if isinstance(word, RetryIn):
            return BackoffRetry(exc=exc, when=word.seconds)
        return None

    def _give_up(self) -> None:
        """Do what is owed for a message of another broker, which no other process settles."""
        request = self._request
        run = getattr(request, "sqs_run_id", None)
        self._task.extension.given_up(self._task, request.id, run=run, began=self._now)

    def _has_failed(self, exc: BaseException, verdict: Verdict) -> Verdict:
        return self._task.extension.run_failed(self._task, exc, verdict)  # type: ignore[no-any-return]

    def _undo(self, exc: BaseException, verdict: Verdict) -> Verdict:
        """Undo if nothing can have been processed, by this run or by one before it."""
        copy = getattr(self._request, "sqs_copy", None)
        if copy is not None and copy is not self._exc:
            return verdict  # what would be undone may be the work of a copy
        verdict = self._has_failed(exc, verdict)
        if verdict.nothing_was_processed and self._task.backoff_options.undo is not None:
            undo(self._task, exc, *self._arguments)
        return verdict

    def _word(self, exc: Exception, verdict: Verdict) -> Word:
        assert self._run is not None
        delivery, options = self._run.delivery, self._task.backoff_options
        stands = standing(delivery, retries=int(self._request.retries), now=self._now)
        delay = self._delay(exc, verdict)
        word = word_for(
            verdict,
            stands,
            max_retries=self._task.max_retries,
            retry_for=options.retry_for,
            delay=delay,
        )
        if isinstance(word, RetryIn):
            return replace(word, seconds=visibility_delay(delay, delivery, now=self._now))
        return word

    def _delay(self, exc: Exception, verdict: Verdict) -> float:
        """Draw the seconds until the retry; an error may say by when it has passed."""
        delay = (verdict.retry_after or 0) + drawn_delay(self._task, self._request)
        before: float | None = getattr(exc, "retry_before", None)
        return delay if before is None else min(delay, before)

    # Elsewhere than on SQS: Celery's own retry, with our delay.

    def _on_another_broker(self, exc: Exception, verdict: Verdict) -> Retry | None:
        if not verdict.wants_retry:
            return None
        request, options = self._request, self._task.backoff_options
        max_retries = self._task.max_retries
        if request.is_eager and max_retries is None:
            return None  # no time passes there: nothing would end it
        delay = self._delay(exc, verdict)
        headers = dict(request.headers or {})
        first_failed_at = headers.setdefault(FIRST_FAILED_AT, self._now)
        elapsed = self._now - first_failed_at
        if exhausted(
            Standing(retries=request.retries, elapsed=elapsed),
            max_retries=max_retries,
            retry_for=options.retry_for,
            delay=delay,
        ):
            return None
        return self._published(request.retries + 1, exc=exc, countdown=delay, headers=headers)

    def _published(self, retries: int, **options: Any) -> Retry:
        publish = partial(Task.retry, self._task, throw=False, **options)
        return publish_as(retries, self._request, publish)

    def _note(self, ended: Ended, exc: BaseException) -> None:
        if self._run is not None:
            is_retried = isinstance(ended.word, RetryIn)
            error = describe(exc, self._task.backoff_options, with_traceback=not is_retried)
            self._run.report = Report(ended, replace(error, trace=current_trace()))
            note_end(self._run, attempt=self._request.retries + 1)


def _is_unpublished(exc: BaseException) -> bool:
    """Return whether this is a ``Retry`` without a message: neither a copy nor the hidden one.

    A task that is called as a function raises it, for its ``retry()`` has no message to publish; or
    the task's code raises one by hand. Celery takes it for a copy, and acknowledges the message.
    """
    return isinstance(exc, Retry) and exc.sig is None and not isinstance(exc, BackoffRetry)


def _retried_for(task: Any, word: Retry) -> Exception | None:
    """Return what the task's ``retry()`` raises for such a word: a retry, or why there is none.

    ``None`` where the task overrides ``retry()``, which may have published a copy its own way.
    """
    if type(task).retry is not task._base_retry:
        return None
    cause = word.exc or word.__cause__ or word.__context__
    if not isinstance(cause, Exception) or isinstance(cause, TaskPredicate):
        cause = None
    when = {"eta" if isinstance(word.when, datetime) else "countdown": word.when}
    try:
        task.retry(exc=cause, **when)
    except Exception as asked:  # noqa: BLE001  # Retry, Reject, or the failure itself
        return asked
    return None


def judge_failure(task: Any, exc: Exception) -> Verdict:
    """Say what a failure of the task's run means, or a retry that it has asked for."""
    if isinstance(exc, Retry):
        return _judge_retry(task, cause_of(exc))
    if (final := Final.of(task.request, exc)) is not None:
        return _judge_retry(task, final.cause)
    return _judge(task, exc)


def _judge_retry(task: Any, cause: BaseException | None) -> Verdict:
    """Say what it means that the task has asked for a retry, whether there is one left or not.

    Arguments:
        cause: what it is retried for. ``None``: the task says itself that nothing was processed.
    """
    if cause is None:
        return Verdict(Outcome.RETRYABLE)
    return _judge(task, cause) if isinstance(cause, Exception) else UNCLASSIFIED


def _judge(task: Any, exc: Exception) -> Verdict:
    options = task.backoff_options
    return judge(
        exc,
        classify=options.classify,
        retry_on=options.retry_on,
        never_retry=options.never_retry,
        task=task.name,
    )


def _reply(exc: BaseException | None, verdict: Verdict) -> Reply | None:
    """Say what a failure shows of the task's provider; ``None`` = nothing.

    Arguments:
        exc: the failure; ``None`` = the task has asked for a retry without one.
        verdict: what it means.
    """
    if exc is None or isinstance(exc, SafeError) or verdict is UNCLASSIFIED:
        return None
    if verdict.outcome is Outcome.NOT_PROCESSED:
        return Reply.ANSWERED
    if isinstance(exc, NonRetryable):
        return None
    return Reply.FAILED if verdict.retry_after is None else Reply.REFUSED


def undo(task: Any, exc: BaseException, args: Any, kwargs: Any) -> None:
    """Call the task's ``undo``. Never raises an ``Exception``."""
    try:
        task.backoff_options.undo(task, exc, args, kwargs)
    except Exception as failure:  # noqa: BLE001  # the user's code
        # The failure that is being handled decides what becomes of the message; an undo that
        # fails too must not turn a retry into a loss. No traceback: it would hold the text of
        # the failure that is being handled, too.
        logger.error(
            "sqs_backoff.undo_failed: task %s: %s",
            printable(task.name),
            error_site(failure),
            extra={"task_name": task.name},
        )


def publish_copy(
    task: Any, publish: Callable[..., Retry], cause: BaseException | None, *, throw: bool
) -> Retry:
    """Publish a copy of the message at once, as Celery does.

    Arguments:
        publish: Celery's own ``retry``, which publishes the copy, and returns.
        cause: see :func:`.retries.cause_of`.

    Raises:
        Retry: with ``throw``.
        Reject: the broker does not take the copy.
    """
    request = task.request
    try:
        copy = publish_as(int(request.retries) + 1, request, publish)
    except Reject as refused:
        note_cause(refused, cause)
        raise
    request.sqs_copy = note_cause(copy, cause)
    if throw:
        raise copy
    return copy


def _as_exception(exc: BaseException) -> Exception:
    return WorkerLostError(f"The task raised {type_name(exc)}")  # type: ignore[no-any-return]

"""A task on its way through the pool, and what each way to end does to its lease.

All callbacks run in the worker's main process, most of them in its event loop: they decide and
return; the keeper speaks to SQS. None of them may raise: in most pools nobody would see it, and
the message would keep its place in the prefetch window for good.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import signals
from celery.exceptions import Ignore, Reject, Retry, Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.request import Request
from kombu.utils.encoding import safe_repr, safe_str

from ..budget import GiveUpReason, capped, spent, spent_before_run, wire_delay
from ..deadletter import DeadLetterRecord
from ..delivery import Delivery
from ..handover import DELIVERY_KEY, BackoffRetry, GiveUp, give_up_of, note_give_up
from ..options import DEAD_LETTER
from ..outcomes import Outcome
from ..safe.shared import busy_receives, count_crash
from ..signals import lease_lost
from .lease import Lease, State
from .lost import LostFlags
from .upstream import ORIGINAL_BODY

__all__ = ["BackoffRequest", "SettledBeforeRun"]

logger = get_logger(__name__)

#: Ends in which no code of the task's was left to say what happened.
_CRASHES = (WorkerLostError, TimeLimitExceeded, SystemExit, KeyboardInterrupt, MemoryError)

#: What has failed there is seldom back sooner.
_AFTER_FAILED_CALLBACK_SECONDS = 30.0

#: A message that is parked although nothing has failed: its task asked to be requeued.
_PARKED = GiveUp(GiveUpReason.PARKED, Outcome.RETRYABLE)

#: On prefork the process is killed only after the callback for its time limit; its message must
#: not come back before it is gone (TERM, 0.1 s, KILL).
_MIN_CRASH_DELAY_SECONDS = 2.0


class SettledBeforeRun(Exception):
    """The message of a request is no longer this worker's: there is nothing to run."""


class BackoffRequest(Request):  # type: ignore[misc]  # Celery is not typed
    """Celery's request, settling the lease where Celery would ack or reject.

    Without a lease (another broker) it is Celery's request. ``on_success`` and
    ``execute_using_pool`` are not overridden: Celery generates its own over them
    (``create_request_cls``).

    Raises:
        SettledBeforeRun: the message's budget was used up before this receive.
    """

    acknowledged: bool  # Celery's: whether the message has been settled

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        self.lease: Lease | None = getattr(message, "sqs_lease", None)
        self._give_up: GiveUp | None = None
        self._traceback: str | None = None
        self._cancelling = False
        if self.lease is not None:
            self.lease.handed_to_pool = self._was_handed_to_pool
            self.lease.on_lost = self._on_lost
            self._tell_the_truth(self.lease.delivery)
            self._refuse_if_spent(self.lease)

    def _tell_the_truth(self, delivery: Delivery) -> None:
        """Correct what only SQS knows, and spare the pool's pipe a second copy of the body.

        The headers of a message never change, so ``retries`` and ``redelivered`` in them say
        what was true when it was first sent.
        """
        request = self._request_dict
        request["retries"] = (request.get("retries") or 0) + delivery.earlier_runs
        self._delivery_info["redelivered"] = delivery.earlier_runs > 0
        properties = dict(request["properties"])
        info = dict(properties["delivery_info"])
        bodies = {"Body", ORIGINAL_BODY}
        info["sqs_message"] = {k: v for k, v in info["sqs_message"].items() if k not in bodies}
        info[DELIVERY_KEY] = delivery
        properties["delivery_info"] = info
        request["properties"] = properties

    def _refuse_if_spent(self, lease: Lease) -> None:
        """The receipt gate. Expired and revoked messages pass: Celery has its own end for them."""
        if self._is_expired_or_revoked():
            return
        options, message_id = self.task.backoff_options, lease.delivery.message_id
        retries = self._request_dict["retries"]
        if options.max_retries is not None and retries > options.max_retries:
            retries -= busy_receives(self.app, message_id)
        reason = spent_before_run(
            lease.delivery,
            retries=retries,
            max_retries=options.max_retries,
            retry_for=options.retry_for,
            crashes=lease.keeper.memory.crashes(message_id),
            crash_budget=options.crash_budget,
            now=time.time(),
        )
        if reason is None:
            return
        failure = self.task.MaxRetriesExceededError(
            f"{self.name}[{self.id}] was not run: {reason.value}"
        )
        exc_info = _exc_info(failure)
        note_give_up(exc_info, GiveUp.because_of(failure, reason, Outcome.UNKNOWN))
        self.on_failure(exc_info)
        raise SettledBeforeRun

    def _is_expired_or_revoked(self) -> bool:
        return bool(self.maybe_expire() or self.id in state.revoked)

    def _on_lost(self) -> None:
        """Tell the task by its flag, and the app by a signal. Called by the keeper's thread."""
        assert self.lease is not None
        if self.lease.delivery.lost_flag is not None:
            LostFlags.set(self.lease.delivery.lost_flag)
        facts = {
            "task_id": self.id,
            "message_id": self.lease.delivery.message_id,
            "queue": self.lease.queue.name,
        }
        # A receiver may take its time; the keeper has leases to renew.
        threading.Thread(
            target=lease_lost.send, args=(self.task,), kwargs=facts, daemon=True
        ).start()

    def _was_handed_to_pool(self) -> bool:
        """Whether the task may be running.

        Pools keep the result that Celery refers to weakly as long as they mean to run the task,
        but for the thread pool: there a task that waits for a thread can be kept from starting.
        """
        waits = self._apply_result is not None and self._apply_result() is not None
        return waits or self.time_start is not None

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Run just before the task where the pool shares this process, else after it was begun.

        Raises:
            SettledBeforeRun: the message has been given back, or lost; the task must not begin.
        """
        if self.lease is not None and self.lease.state is not State.HELD and pid == os.getpid():
            raise SettledBeforeRun
        super().on_accepted(pid, time_accepted)

    def revoked(self) -> bool:
        """Whether not to start the task: also when its message has been given back, or lost."""
        if self.lease is not None and self.lease.state is not State.HELD:
            return True
        return bool(super().revoked())

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        """End the run for a cold shutdown or after a lost connection, where the pool can.

        Solo and threads cannot. Celery's error of not being able to would be raised in the midst
        of the solo pool's task, and fail it; instead the task ends by itself.
        """
        self._cancelling = True  # first: eventlet's pool calls back before this returns
        try:
            super().cancel(pool, signal, **options)  # emit_retry, from Celery 5.6 on
        except NotImplementedError:
            self._cancelling = False
            logger.info("Task %s[%s] cannot be cancelled in this pool", self.name, self.id)

    # Celery's two ways to be rid of a message

    def acknowledge(self) -> None:
        """Settle the lease: done, or given up if that is what has happened."""
        if self.lease is None:
            super().acknowledge()
        elif not self.acknowledged:
            self.acknowledged = True
            if self._cancelling and self.worker_pid == os.getpid():
                # gevent and eventlet report a greenlet they killed as a success. (What a child
                # process reports after that it has done while a soft shutdown was slept through.)
                self.lease.release()
                return
            give_up, self._give_up = self._give_up, None
            if give_up is None:
                self.lease.done()
            else:
                self._settle_given_up(give_up)

    def reject(self, requeue: bool = False) -> None:
        """Settle the lease: back to the queue after a delay, or given up."""
        if self.lease is None:
            super().reject(requeue)
        elif not requeue:
            if self._give_up is None:
                self._give_up = GiveUp(GiveUpReason.REJECTED, Outcome.UNKNOWN)
            self.acknowledge()
            self.send_event("task-rejected", requeue=requeue)
        elif not self.acknowledged:
            self.acknowledged = True
            self._defer(self._draw_delay())
            self.send_event("task-rejected", requeue=requeue)

    # Callbacks of the pool

    def on_retry(self, exc_info: Any) -> None:
        exc = _raised(exc_info)
        if self.lease is None or not isinstance(exc, BackoffRetry):
            super().on_retry(exc_info)  # a copy has been published: this message is done
            return
        self.acknowledged = True
        self._defer(float(exc.when), exc.exc)
        self._send_retried(exc.exc, exc_info.traceback)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        if self.lease is None:
            super().on_failure(exc_info, send_failed_event, return_ok)
            return
        self._contained(self._on_failure, exc_info, send_failed_event, return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if self.lease is None or soft:
            super().on_timeout(soft, timeout)
        elif not self.acknowledged:  # else on_failure, which prefork calls first, has seen to it
            logger.error("Hard time limit (%ss) exceeded for %s[%s]", timeout, self.name, self.id)
            self.on_failure(_exc_info(TimeLimitExceeded(timeout)))

    def _on_failure(self, exc_info: Any, send_failed_event: bool, return_ok: bool) -> None:
        exc = _raised(exc_info)
        crashed = isinstance(exc, _CRASHES) and not return_ok
        if (crashed or isinstance(exc, Terminated)) and self._was_cancelled():
            self._give_back()
            return
        if crashed and not self._already_revoked:
            if self._back_off_after_crash(exc, exc_info):
                return
        elif not isinstance(exc, (Retry, Ignore, Reject, Terminated)):
            self._note(
                give_up_of(exc_info)
                or GiveUp.because_of(exc, GiveUpReason.NOT_RETRYABLE, Outcome.UNKNOWN),
                exc_info,
            )
        super().on_failure(exc_info, send_failed_event, return_ok)

    def _contained(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            callback(*args)
        except Exception:
            # The result backend is down, or a signal's receiver raises. What is known of the
            # message's fate holds; if nothing is, it comes back, but not at once.
            logger.exception("sqs_backoff.callback_failed", extra={"task_id": self.id})
            assert self.lease is not None
            self.lease.defer(_AFTER_FAILED_CALLBACK_SECONDS)

    # Crashes: no task code was left to decide, so the main process does

    def _was_cancelled(self) -> bool:
        """Whether the worker ended the run itself: a cold shutdown, or a lost connection."""
        return bool(self._cancelling or state.should_terminate)

    def _give_back(self) -> None:
        """Undo the receive, as far as that goes: another worker runs it, at once."""
        assert self.lease is not None
        state.task_ready(self)
        self.acknowledged = True
        self.lease.release()

    def _back_off_after_crash(self, exc: BaseException, exc_info: Any) -> bool:
        """Retry a run that took its process along, or note why not and return ``False``."""
        assert self.lease is not None
        if _success_was_stored(self, exc):
            return False
        delivery, options = self.lease.delivery, self.task.backoff_options
        crashes = max(
            self.lease.keeper.memory.count_crash(delivery.message_id),
            count_crash(self.app, delivery.message_id),
        )
        drawn = max(_MIN_CRASH_DELAY_SECONDS, self._draw_delay())
        reason = spent(
            delivery,
            retries=self._request_dict["retries"],
            max_retries=options.max_retries,
            retry_for=options.retry_for,
            delay=drawn,
            now=time.time(),
        )
        if crashes >= options.crash_budget:
            limit = isinstance(exc, TimeLimitExceeded)
            reason = GiveUpReason.TIME_LIMIT if limit else GiveUpReason.WORKER_LOST
        if reason is not None:
            self._note(GiveUp.because_of(exc, reason, Outcome.UNKNOWN), exc_info)
            return False
        state.task_ready(self)
        self.acknowledged = True
        delay = self._defer(drawn, exc)
        self._announce_retry(exc, exc_info, delay)
        return True

    def _announce_retry(self, exc: BaseException, exc_info: Any, delay: int) -> None:
        """What the task's own process says of a retry, for one that could not say it."""
        task, context = self.task, self._context
        if self.store_errors:
            task.backend.mark_as_retry(self.id, exc, exc_info.traceback, request=context)
        self._send_retried(exc, exc_info.traceback)
        reason = Retry(exc=exc, when=delay)
        task.request_stack.push(context)
        try:
            task.on_retry(exc, self.id, self.args, self.kwargs, exc_info)
            signals.task_retry.send(sender=task, request=context, reason=reason, einfo=exc_info)
        finally:
            task.request_stack.pop()
        logger.info("Task %s[%s] retry: %s", self.name, self.id, reason)

    # Settling

    def _note(self, give_up: GiveUp, exc_info: Any) -> None:
        self._give_up, self._traceback = give_up, exc_info.traceback

    def _settle_given_up(self, give_up: GiveUp) -> None:
        assert self.lease is not None
        queue, wants_dlq = self.lease.queue, self.task.backoff_options.on_give_up == DEAD_LETTER
        if wants_dlq and not queue.is_read:
            self.lease.keeper.postpone(self.lease, self._record(give_up))
        elif wants_dlq and queue.dlq_url:
            self.lease.dead_letter(self._record(give_up))
        else:
            self.lease.done()

    def _record(self, give_up: GiveUp) -> DeadLetterRecord:
        assert self.lease is not None
        return DeadLetterRecord(
            task=self._type,
            id=self.id,
            reason=give_up.reason.value,
            outcome=give_up.outcome.name,
            exception_type=give_up.exception_type,
            exception_message=give_up.exception_message,
            traceback=self._traceback,
            attempts=self._request_dict["retries"] + 1,
            first_received_at=self.lease.delivery.first_received_at,
            failed_at=time.time(),
            origin=self.lease.queue.arn or self.lease.queue.url,
            worker=self.hostname,
        )

    def _draw_delay(self) -> float:
        assert self.lease is not None
        backoff = self.task.backoff_options.backoff
        attempt = self._request_dict["retries"] + 1
        delay: float = backoff.delay_for(self.lease.delivery.message_id, attempt, random)
        if self.lease.queue.is_fifo:
            return capped(delay, backoff.ceiling(attempt), self.task.backoff_options.fifo_cap)
        return delay

    def _defer(self, delay: float, exc: BaseException | None = None) -> int:
        """Hide the message; return for how many seconds."""
        lease = self.lease
        assert lease is not None
        seconds = wire_delay(delay, lease.delivery, now=time.time())
        why = GiveUp.because_of(exc, GiveUpReason.PARKED, Outcome.RETRYABLE) if exc else _PARKED

        def park(seconds_left: float) -> DeadLetterRecord:
            return replace(self._record(why), due_at=time.time() + seconds_left)

        # A message that is parked would be overtaken by the rest of its message group.
        can_park = lease.queue.dlq_url is not None and not lease.queue.is_fifo
        above = self.task.backoff_options.park_above if can_park else None
        lease.defer(seconds, park_above=above, park=park)
        return seconds

    def _send_retried(self, exc: object, traceback: object) -> None:
        self.send_event("task-retried", exception=safe_repr(exc), traceback=safe_str(traceback))


def _raised(exc_info: Any) -> BaseException:
    """The exception itself: pools in this process hand it over wrapped with its traceback."""
    exc = exc_info.exception
    raised: BaseException = exc.exc if isinstance(exc, ExceptionWithTraceback) else exc
    return raised


def _exc_info(exc: BaseException) -> Any:
    try:
        raise exc
    except type(exc):
        return ExceptionInfo()


def _success_was_stored(request: Any, exc: BaseException) -> bool:
    """Whether the process was lost only after its task had succeeded (Celery 5.7 can tell)."""
    check = getattr(request, "_success_was_stored", None)
    return isinstance(exc, WorkerLostError) and check is not None and bool(check())

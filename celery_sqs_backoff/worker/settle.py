"""From how a run ended to the settlement of its message: one decision, told once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from celery.utils.log import get_logger

from ..observe.events import DeadLettered, Discarded, OfTask, Retried, RunEnded
from ..retry.budget import GiveUpReason, draw_delay
from ..retry.decision import (
    NO_FACTS,
    DeadLetter,
    Delete,
    End,
    Facts,
    GiveBack,
    Hide,
    RunEnd,
    Settle,
    decide,
    needs_delay,
    needs_facts,
)
from ..retry.options import DEAD_LETTER
from ..retry.outcomes import Outcome
from ..sqs.dead_letter import DeadLetterRecord
from ..sqs.limits import MAX_IN_FLIGHT_MESSAGES
from ..sqs.redact import ErrorText
from ..sqs.visibility import standing, visibility_delay
from ..text import error_site, printable
from ..threads import call_in_time
from .lease import Lease
from .unreadable import record_of

logger = get_logger(__name__)

#: After which a message comes back because the broker did not take the task that takes its
#: workflows back.
_COMES_BACK_SECONDS = 30.0

#: How long the event loop waits for the broker to take the task that takes workflows back.
_SEND_SECONDS = 3.0


class Settler:
    """Settles the message of one request. Runs in the worker's main process.

    Arguments:
        request: Celery's, of our class.
        lease: on its message.
    """

    def __init__(self, request: Any, lease: Lease) -> None:
        self._request = request
        self.lease, self._gate = lease, lease.gate
        self._options = request.task.backoff_options

    def settle(self, ended: RunEnd, error: ErrorText) -> Settle | None:
        """Decide, and settle the lease. Does not wait for SQS. Never raises.

        The first end of a run counts. For any other one this returns ``None``.

        Where something fails on the way (a store, a provider's gate), a message that has served is
        deleted nevertheless, and any other comes back: it must not be held for good.
        """
        if self._request.acknowledged:
            return None
        self._request.acknowledged = True
        settle: Settle | None = None
        try:
            facts = self._facts(ended) if needs_facts(ended) else NO_FACTS
            settle = decide(ended, facts)
            return self._carry_out(settle, ended, error, facts)
        except Exception as exc:  # noqa: BLE001  # a user's store, or a bug
            logger.error(
                "sqs_backoff.settle_failed: task %s[%s]: %s",
                *(printable(self._request.name), printable(self._request.id), error_site(exc)),
            )
        if isinstance(settle, Delete) and settle.reason is None:
            self.lease.done()
            return settle
        self.lease.defer(_COMES_BACK_SECONDS)
        return Hide(_COMES_BACK_SECONDS, Outcome.UNKNOWN)

    def _carry_out(self, settle: Settle, ended: RunEnd, error: ErrorText, facts: Facts) -> Settle:
        end = ended.end
        reason = settle.reason if isinstance(settle, DeadLetter | Delete) else None
        if end.is_run:
            # A run that failed and left no decision may have done anything.
            outcome = Outcome.UNKNOWN if ended.decision is None else ended.decision.outcome
            told = "succeeded" if end.is_success else outcome.value
            self._emit(RunEnded, outcome=told, attempt=self._attempt)
        if self._gate is not None:
            self._gate.ended(self.lease, ended)
        is_given_up = reason is not None and not end.is_success
        is_owed = (is_given_up or end is End.REVOKED) and not self._take_back()
        if is_owed and not self._goes_all_the_same(ended, settle):
            settle, reason = Hide(_COMES_BACK_SECONDS, Outcome.UNKNOWN), None
        if isinstance(settle, Hide):
            return self._hide(settle, ended, error, facts)
        if isinstance(settle, GiveBack):
            if not settle.started:
                self.lease.give_back()
            elif self.lease.release():
                self._emit_retry(0, Outcome.UNKNOWN, ended, error, facts)
            return settle
        if isinstance(settle, DeadLetter):
            record = self._record(settle.reason, settle.outcome, error)
            is_settled = self.lease.keeper.give_up(self.lease, record)
        else:
            is_settled = self.lease.done() if reason is None else self.lease.drop()
        # A message that was lost runs again on another worker, which tells of it.
        if is_settled and reason is not None:
            is_kept = isinstance(settle, DeadLetter)
            self._emit_given_up(reason, settle.outcome, error, is_kept=is_kept)
        elif is_settled and end is End.REVOKED:
            self._emit(Discarded)
        return settle

    def _goes_all_the_same(self, ended: RunEnd, settle: Settle) -> bool:
        """Return whether the message goes although a duty is left.

        A run that raised may have done what must not be repeated. And at the next receive SQS would
        move the message itself, without its reason.
        """
        is_last = self.lease.delivery.is_last_before_sqs_moves_it
        return ended.end is End.RAISED or (isinstance(settle, DeadLetter) and is_last)

    def _take_back(self) -> bool:
        """Let the task's extension send the undoing of steps, and return whether it did."""
        delivery, request = self.lease.delivery, self._request
        give_up = partial(
            request.task.extension.given_up,
            request.task,
            request.id,
            run=delivery.run_id,
            began=delivery.received_at,
            queue=self.lease.queue.name,
        )
        asked = call_in_time(give_up, seconds=_SEND_SECONDS)
        return asked is not None and asked.done() and bool(asked.result())

    @property
    def _attempt(self) -> int:
        return int(self._request.retries) + 1

    def _facts(self, ended: RunEnd) -> Facts:
        options, queue, delivery = self._options, self.lease.queue, self.lease.delivery
        has_dlq = queue.dlq_url is not None
        crashes = 0
        if ended.decision is None and ended.end.is_crash:
            crashes = self.lease.keeper.memory.count_crash(delivery.message_id)
        return Facts(
            standing=standing(delivery, retries=self._request.retries, now=time.time()),
            max_retries=options.max_retries,
            retry_for=options.retry_for,
            crash_budget=options.crash_budget,
            crashes=crashes,
            delay=self._draw_delay() if needs_delay(ended) else 0.0,
            keeps_dead_letters=options.on_give_up == DEAD_LETTER and (has_dlq or not queue.is_read),
        )

    def _draw_delay(self) -> float:
        return draw_delay(
            self._options,
            message_id=self.lease.delivery.message_id,
            attempt=self._attempt,
            is_fifo=self.lease.queue.is_fifo,
            rng=random,
        )

    def _hide(self, hide: Hide, ended: RunEnd, error: ErrorText, facts: Facts) -> Hide:
        delay = hide.seconds
        if self._gate is not None:
            delay = self._gate.delayed(delay, self.lease, ended, self._options)
        seconds = visibility_delay(delay, self.lease.delivery, now=time.time())
        parks = self._must_park()
        if parks:
            record = self._record(GiveUpReason.PARKED, hide.outcome, error)
            is_kept = self.lease.dead_letter(replace(record, due_at=time.time() + seconds))
        else:
            is_kept = self.lease.defer(seconds)
        if is_kept:
            self._emit_retry(seconds, hide.outcome, ended, error, facts)
            if parks:
                self._emit_given_up(GiveUpReason.PARKED, hide.outcome, error, is_kept=True)
        return replace(hide, seconds=seconds)

    def _must_park(self) -> bool:
        """Return whether too many messages of the queue are in flight to hide another one.

        On a FIFO queue the rest of the message group would overtake a message that is parked.
        """
        queue, above = self.lease.queue, self._options.park_above
        if above is None or queue.dlq_url is None or queue.is_fifo:
            return False
        return bool(queue.messages_in_flight >= above * MAX_IN_FLIGHT_MESSAGES)

    def _record(self, reason: GiveUpReason, outcome: Outcome, error: ErrorText) -> DeadLetterRecord:
        return record_of(
            self.lease,
            worker=self._request.hostname,
            task=self._request.type,
            task_id=self._request.id,
            reason=reason.value,
            outcome=outcome.name,
            attempts=self._attempt,
            error=error,
        )

    def _emit_retry(
        self, seconds: int, outcome: Outcome, ended: RunEnd, error: ErrorText, facts: Facts
    ) -> None:
        retry_for, elapsed = facts.retry_for, facts.standing.elapsed
        self._emit(
            Retried,
            delay=float(seconds),
            attempt=self._attempt,
            outcome=outcome.value,
            reason=ended.end.value,
            error=error.exception_type,
            budget_left=None if retry_for is None else max(0, int(retry_for - elapsed)),
        )

    def _emit_given_up(
        self, reason: GiveUpReason, outcome: Outcome | None, error: ErrorText, *, is_kept: bool
    ) -> None:
        self._emit(
            DeadLettered,
            reason=reason.value,
            outcome=outcome.value if outcome else None,
            attempt=self._attempt,
            error=error.exception_type,
            is_kept=is_kept,
        )

    def _emit(self, kind: Callable[..., OfTask], **facts: object) -> None:
        event = kind(
            queue=self.lease.queue.name,
            task=self._request.type,
            task_id=self._request.id,
            message_id=self.lease.delivery.message_id,
            **facts,
        )
        self.lease.keeper.events.emit(event)

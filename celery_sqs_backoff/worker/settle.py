"""Settles the message of a task after its run, and emits the events about it.

To settle a message, the worker deletes it, hides it until a retry, sends it to the dead-letter
queue, or gives it back, so that any worker can receive it.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from typing import Any

from celery.utils.log import get_logger

from ..observe.events import DeadLettered, Discarded, Retried, RunEnded
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
from ..sqs.limits import MAX_IN_FLIGHT_MESSAGES
from ..sqs.redact import ErrorText
from ..text import error_site, printable
from ..threads import call_in_time
from .lease import Lease

logger = get_logger(__name__)

#: How long to hide a message that must come back after an error. Either this module has failed to
#: settle the message, or the broker did not accept the task that undoes the message's
#: workflows.
_COMES_BACK_SECONDS = 30.0

#: How long Celery's event loop waits for the broker to accept the undo task.
_SEND_SECONDS = 3.0


class Settler:
    """Settles the message of one request. Runs in the worker's main process.

    Arguments:
        request: Celery's request, a :class:`.BackoffRequest`.
        lease: the lease on its message.
    """

    def __init__(self, request: Any, lease: Lease) -> None:
        self._request = request
        self.lease, self._gate = lease, lease.gate
        self._options = request.task.backoff_options
        self._events = lease.keeper.events
        self._attempt = int(request.retries) + 1
        self._names: dict[str, Any] = {  # the fields that all events about the message have
            "queue": lease.queue.name,
            "task": request.type,
            "task_id": request.id,
            "message_id": lease.message_id,
        }

    def settle(self, ended: RunEnd, error: ErrorText) -> Settle | None:
        """Decide how to settle the message, and settle it through its lease. Never raises.

        Do not wait until SQS confirms the settlement. If the task is given up or revoked, wait for
        at most 3 seconds until the broker has accepted a task that undoes the workflows which the
        message's runs have begun.

        Only the first call counts. A later call does nothing, and returns ``None``.

        If this method fails, a message that is not given up but only deleted (for example after a
        success) is still deleted. Any other message is hidden for 30 seconds, so that the worker
        does not hold it for ever.

        Returns:
            How the message is settled, with the seconds for which it is hidden.
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

    def _facts(self, ended: RunEnd) -> Facts:
        options, queue, delivery = self._options, self.lease.queue, self.lease.delivery
        crashes, delay = 0, 0.0
        if ended.decision is None and ended.end.is_crash:
            crashes = self.lease.keeper.memory.count_crash(delivery.message_id)
        if needs_delay(ended):
            delay = draw_delay(
                options,
                message_id=delivery.message_id,
                attempt=self._attempt,
                is_fifo=queue.is_fifo,
                rng=random,
            )
        has_place = queue.dlq_arn is not None or not queue.is_read
        return Facts(
            standing=delivery.standing(retries=self._request.retries, now=time.time()),
            max_retries=options.max_retries,
            retry_for=options.retry_for,
            crash_budget=options.crash_budget,
            crashes=crashes,
            delay=delay,
            keeps_dead_letters=options.on_give_up == DEAD_LETTER and has_place,
        )

    def _carry_out(self, settle: Settle, ended: RunEnd, error: ErrorText, facts: Facts) -> Settle:
        end, lease = ended.end, self.lease
        if end.is_run:
            # If the task's process made no decision, it is unknown whether the work was done.
            outcome = Outcome.UNKNOWN if ended.decision is None else ended.decision.outcome
            told = "succeeded" if end.is_success else outcome.value
            self._events.emit(RunEnded(**self._names, outcome=told, attempt=self._attempt))
        if self._gate is not None:
            self._gate.ended(lease, ended)
        reason = settle.reason if isinstance(settle, DeadLetter | Delete) else None
        is_over = end is End.REVOKED or (reason is not None and not end.is_success)
        if is_over and self._must_come_back(settle, end):
            settle = Hide(_COMES_BACK_SECONDS, Outcome.UNKNOWN)
        if isinstance(settle, Hide):
            return self._hide(settle, ended, error, facts)
        # Each method of the lease below returns False if the message was lost. In that case emit no
        # event, because another worker runs the message again, and emits the event.
        if isinstance(settle, GiveBack):
            if lease.release():
                self._events.emit(self._retried(0, Outcome.UNKNOWN, ended, error, facts))
        elif isinstance(settle, DeadLetter):
            if self._dead_letter(settle.reason, settle.outcome, error):
                self._tell_given_up(settle.reason, settle.outcome, error)
        elif settle.reason is not None:
            if lease.drop():
                self._tell_given_up(settle.reason, settle.outcome, error, is_kept=False)
        elif lease.done() and end is End.REVOKED:
            self._events.emit(Discarded(**self._names))
        return settle

    def _must_come_back(self, settle: Settle, end: End) -> bool:
        """Send the task that undoes the message's workflows. Return whether to hide the message.

        If the broker has not accepted the undo task in time, hide the message, so that it comes
        back for another try. There are two exceptions:

        - If the task has raised an error, do not hide the message, because the task could run again
          when the message comes back.
        - If the message must become a dead letter, and SQS would move it to the dead-letter queue
          at the next receive, do not hide it, because SQS would move it without the record of
          the reason.
        """
        delivery, request = self.lease.delivery, self._request
        take_back = partial(
            request.task.extension.given_up,
            request.task,
            request.id,
            run=delivery.run_id,
            began=delivery.received_at,
            queue=delivery.queue,
        )
        asked = call_in_time(take_back, seconds=_SEND_SECONDS)
        if asked is not None and asked.done() and asked.result():
            return False
        is_last = isinstance(settle, DeadLetter) and delivery.is_last_before_sqs_moves_it
        return end is not End.RAISED and not is_last

    def _hide(self, hide: Hide, ended: RunEnd, error: ErrorText, facts: Facts) -> Hide:
        lease, delay = self.lease, hide.seconds
        if self._gate is not None:
            delay = self._gate.delayed(delay, lease, ended, self._options)
        seconds = lease.delivery.visibility_delay(delay, now=time.time())
        parks = self._must_park()
        if parks:
            due_at = time.time() + seconds
            is_kept = self._dead_letter(GiveUpReason.PARKED, hide.outcome, error, due_at=due_at)
        else:
            is_kept = lease.defer(seconds)
        if is_kept:
            self._events.emit(self._retried(seconds, hide.outcome, ended, error, facts))
            if parks:
                self._tell_given_up(GiveUpReason.PARKED, hide.outcome, error)
        return replace(hide, seconds=seconds)

    def _must_park(self) -> bool:
        """Return whether the queue has too many messages in flight to hide one more.

        If so, the worker parks the message, which means that the message becomes a dead letter
        instead. The worker parks no message of a FIFO queue, because later messages of the same
        message group would overtake the parked message.
        """
        queue, above = self.lease.queue, self._options.park_above
        if above is None or queue.dlq_arn is None or queue.is_fifo:
            return False
        return bool(queue.messages_in_flight >= above * MAX_IN_FLIGHT_MESSAGES)

    def _dead_letter(
        self, reason: GiveUpReason, outcome: Outcome, error: ErrorText, **facts: Any
    ) -> bool:
        return self.lease.give_up(
            error,
            task=self._request.type,
            id=self._request.id,
            reason=reason.value,
            outcome=outcome.name,
            attempts=self._attempt,
            worker=self._request.hostname,
            **facts,
        )

    # Events

    def _retried(
        self, seconds: int, outcome: Outcome, ended: RunEnd, error: ErrorText, facts: Facts
    ) -> Retried:
        """Return the event about a message that will run again."""
        retry_for, elapsed = facts.retry_for, facts.standing.elapsed
        return Retried(
            **self._names,
            delay=float(seconds),
            attempt=self._attempt,
            outcome=outcome.value,
            reason=ended.end.value,
            error=error.exception_type,
            budget_left=None if retry_for is None else max(0, int(retry_for - elapsed)),
        )

    def _tell_given_up(
        self,
        reason: GiveUpReason,
        outcome: Outcome | None,
        error: ErrorText,
        *,
        is_kept: bool = True,
    ) -> None:
        given_up = DeadLettered(
            **self._names,
            reason=reason.value,
            outcome=outcome.value if outcome else None,
            attempt=self._attempt,
            error=error.exception_type,
            is_kept=is_kept,
        )
        self._events.emit(given_up)

"""Decides whether a received message runs. One method has all the reasons against it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state

from ..retry.budget import GiveUpReason, find_reason_before_run
from ..sqs.delivery import parse_eta
from ..sqs.queues import Queue
from . import unreadable
from .inbox import Inbox
from .lease import Lease
from .payload import IGNORED
from .providers import Gate

logger = get_logger(__name__)

#: The worker holds a message whose task is due within this time. SQS hides a message that is due
#: later, because held messages use up the 100 places for waiting ones (``window.MAX_BLOCKED``).
_LONGEST_HELD_SECONDS = 15.0


class Admission:
    """Admits the messages of one worker.

    Arguments:
        worker: its name, for dead letters.
        inbox: gets a message that had to wait, once its provider lets it start.
    """

    def __init__(self, worker: str, inbox: Inbox) -> None:
        self._worker = worker
        self._inbox = inbox
        #: False while the worker stops, or has lost its connection.
        self.is_open = True

    def admit(self, lease: Lease, *, starts: bool) -> bool:
        """Keep a message back, or settle it, if it must not run now. Return whether Celery gets it.

        The first reason in the table counts. A message that is given up goes to Celery, too, so
        that its request reports the failure (``Lease.refused``).

        The worker calls this when it receives the message. It calls it again when Celery has found
        the task, if the task has a provider or was unknown at the receive, and when the task
        starts, if Celery made it wait. When the task begins, ``request.may_begin`` checks that the
        worker still holds the message and that the provider is up.

        ====================  ==========================================  ==========================
        reason                sign                                        the message
        ====================  ==========================================  ==========================
        stopping              the worker stops, or is not connected       given back
        known, or lost        this worker has settled it, or goes on      left alone
                              with an earlier receive; or it was lost
        ignored               the app's adapter says so                   deleted
        not understood        no task can be made of it                   hidden; a dead letter at
                                                                          its last receive
        expired or revoked    its headers, and Celery's list              goes to Celery: it ends it
        never due             its ETA is after the queue's retention      given up
        over budget           earlier runs have used up a budget          given up
        not due               its ETA is later than a worker holds it     hidden until then
        provider is down      the gate hides it                           hidden
        not its turn          the provider recovers, or has a rate        waits here, or is hidden
        ====================  ==========================================  ==========================

        Arguments:
            starts: whether the task starts now. False: Celery makes it wait first.
        """
        now = time.time()
        if not self.is_open:
            lease.give_back()
        if not lease.may_start():
            return False
        if lease.payload is IGNORED:
            logger.info("sqs_backoff.ignored: message %s on %s", lease.message_id, lease.source)
            lease.done()
            return False
        if lease.payload is None:
            unreadable.keep(lease, {}, lease.why, worker=self._worker)
            return False
        headers: Mapping[str, Any] = lease.payload["headers"]
        if _ends_in_celery(headers, now):
            return True
        lease.refused = _reason_to_give_up(lease, headers, now)
        if lease.refused is not None:
            return True
        due_at = lease.delivery.due_at
        if not starts and due_at is not None and _hide_until(due_at, lease, now):
            return False
        return lease.gate is None or not self._waits_for_provider(lease, lease.gate, starts)

    def _waits_for_provider(self, lease: Lease, gate: Gate, starts: bool) -> bool:
        """Keep a message back if its provider does not let it start. Return whether it is kept.

        If Celery makes the task wait first, the worker asks again when the task starts, because the
        provider may be down by then. So before that wait, the provider keeps a message back only if
        its gate hides every message.
        """
        options = lease.options
        if options is None or not (starts or gate.hides_all):
            return False
        if gate.keeps_back(lease, options, partial(self._inbox.put, lease)):
            return True
        if not starts:
            lease.has_turn = False
        return False


def held_seconds(queue: Queue) -> float:
    """Return the most seconds for which a worker holds a message that is not due.

    If it is due later, SQS hides it.
    """
    return min(_LONGEST_HELD_SECONDS, queue.visibility_timeout_seconds / 2)


def _ends_in_celery(headers: Mapping[str, Any], now: float) -> bool:
    if headers.get("id") in state.revoked:
        return True
    expires = headers.get("expires")
    return expires is not None and (parse_eta(expires) or math.inf) <= now


def _reason_to_give_up(lease: Lease, headers: Mapping[str, Any], now: float) -> GiveUpReason | None:
    """Return why a message is given up without being run, or ``None``.

    Earlier runs have used up a budget, or the message can never be due.
    """
    options, delivery = lease.options, lease.delivery
    if options is None:
        return None
    if delivery.due_at is not None and delivery.due_at >= (delivery.expires_at or math.inf):
        return GiveUpReason.NEVER_DUE
    retries = (headers.get("retries") or 0) + delivery.earlier_runs
    crashes = lease.keeper.memory.crashes.get(delivery.message_id, 0)
    if not retries and not crashes:
        return None
    return find_reason_before_run(
        delivery.standing(retries=retries, now=now),
        max_retries=options.max_retries,
        retry_for=options.retry_for,
        crashes=crashes,
        crash_budget=options.crash_budget,
    )


def _hide_until(eta: float, lease: Lease, now: float) -> bool:
    """Hide a message until its task is due, or for as long as SQS can. Return whether it is hidden.

    If the task is due soon, the worker holds the message instead. At the last receive that the
    queue allows, the message is not hidden, because SQS would move it to the dead-letter queue at
    the next receive.
    """
    if eta <= now or lease.delivery.is_last_before_sqs_moves_it:
        return False
    seconds = lease.delivery.visibility_delay(eta - now, now=now)
    return seconds > held_seconds(lease.queue) and lease.defer(seconds)

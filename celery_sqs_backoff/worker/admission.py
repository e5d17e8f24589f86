"""Decides whether a received message may run. ``Admission.admit`` lists the reasons against it.

To settle a message is to delete it, hide it, give it back, or send it to the dead-letter queue. To
give a message back is to let SQS show it again without counting an attempt.
"""

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

#: A message may wait in the worker for its ETA for this time at most. If its ETA is further away,
#: the worker hides the message on SQS. Otherwise such messages could fill the 100 places in the
#: worker for messages that wait for something other than a process (``window.MAX_BLOCKED``).
_LONGEST_HELD_SECONDS = 15.0


class Admission:
    """Decides for one worker which of its messages may run.

    A lease (:class:`.Lease`) is one received message that the worker holds.

    Arguments:
        worker: the worker's name, for dead-letter records.
        inbox: gets a message again when its wait for its provider is over.
    """

    def __init__(self, worker: str, inbox: Inbox) -> None:
        self._worker = worker
        self._inbox = inbox
        #: False while the worker stops, or is not connected.
        self.is_open = True

    def admit(self, lease: Lease, *, starts: bool) -> bool:
        """Return whether a message goes to Celery now. If not, settle it or make it wait.

        The first row of the table that applies decides. A message that is given up goes to Celery,
        too. Celery does not run its task, but reports the failure (``Lease.refused``).

        The worker calls this up to three times for a message:

        - when the worker receives the message;
        - when Celery has found the task, if the task has a provider or was not known before;
        - when the task starts, if it has waited in Celery for its ETA or a rate limit.

        Later, when a process is free for the task, ``request.may_begin`` makes a last check.

        ====================  ==========================================  ==========================
        reason                sign                                        the message
        ====================  ==========================================  ==========================
        stopping              the worker stops, or is not connected       given back
        known, or lost        this worker has settled it, holds it from   left alone
                              an earlier receive, or has lost it
                              (another worker may have it)
        ignored               the app's adapter says: it needs no task    deleted
        not understood        no task can be made of it                   hidden; a dead letter at
                                                                          its last receive
        expired or revoked    its header ``expires`` or Celery's list of  goes to Celery, which
                              revoked tasks says so                       discards it
        never due             its ETA is after the end of its retention   given up
                              period
        over budget           earlier runs have used up a budget, such    given up
                              as ``max_retries``
        not due               its ETA is more than ``held_seconds`` away  hidden until its ETA
        provider is down      its gate (circuit breaker) is open          hidden
        not its turn          the provider recovers, or has a rate        waits here, or is hidden
        ====================  ==========================================  ==========================

        Arguments:
            starts: whether the task starts now. ``False``: the worker has just received the
                message, or the task must first wait in Celery for its ETA or a rate limit.
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

        If ``starts`` is false, the message must first wait in Celery. After that wait, the worker
        checks the message again. So the message is kept back now only if the provider is down and
        no probe is due.
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
    """Return how many seconds a message may wait in the worker for its ETA.

    If its ETA is further away, the worker hides the message on SQS.
    """
    return min(_LONGEST_HELD_SECONDS, queue.visibility_timeout_seconds / 2)


def _ends_in_celery(headers: Mapping[str, Any], now: float) -> bool:
    if headers.get("id") in state.revoked:
        return True
    expires = headers.get("expires")
    return expires is not None and (parse_eta(expires) or math.inf) <= now


def _reason_to_give_up(lease: Lease, headers: Mapping[str, Any], now: float) -> GiveUpReason | None:
    """Return why to give up a message instead of running it, or ``None`` to run it.

    Either earlier runs have used up a budget, or the ETA is after the end of the retention period.
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
    """Hide a message until its ETA, or for as long as SQS can. Return whether it is hidden.

    A message that is due soon waits in the worker instead. So does a message at the last receive
    that its queue allows, because SQS would move it to the dead-letter queue at the next receive.
    """
    if eta <= now or lease.delivery.is_last_before_sqs_moves_it:
        return False
    seconds = lease.delivery.visibility_delay(eta - now, now=now)
    return seconds > held_seconds(lease.queue) and lease.defer(seconds)

"""Show the messages of a dead-letter queue, and predict a redrive, without sending or deleting.

A *peek* receives each message, which hides it from other consumers, and then makes SQS show it
again. SQS counts each receive, so the message's receive count rises by one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sqs.limits import MAX_BATCH_ENTRIES
from ..threads import steady_seconds
from .errors import RedriveUnreachable
from .events import Ended
from .files import Archive, NoJournal
from .halt import Halt
from .ledger import Ledger
from .message import DlqMessage
from .options import RedriveOptions
from .queues import Route, open_route
from .sweep import Sweep
from .throttle import seconds_for
from .triage import NOT_SELECTED, UNKNOWN, Action, Disposition, triage

if TYPE_CHECKING:
    from celery import Celery

DEFAULT_SAMPLE = 1_000

#: ``Plan.letters`` has at most this number of messages. Further messages are only counted.
_MOST_FACTS = 10_000

#: Seconds for which a receive hides a message. A longer peek renews this time.
_HOLD_SECONDS = 60

_MOST_THREADS = 8

#: Upper ends of the age classes, in seconds.
_AGES: Mapping[str, float] = {
    "under 1 h": 3_600,
    "1 h to 6 h": 21_600,
    "6 h to 1 d": 86_400,
    "1 d to 4 d": 345_600,
    "over 4 d": float("inf"),
}


@dataclass(frozen=True)
class MessageFacts:
    """One dead letter, without its body.

    ``age_seconds``: seconds since the message was first sent; ``None`` = unknown. ``reason``,
    ``outcome``, ``error`` and ``attempts`` are from the dead-letter record, in which a worker
    describes the last failure; ``None`` = no record. ``action`` and ``why``: how a redrive would
    treat the message, and the reason.
    """

    id: str
    task: str | None
    task_id: str | None
    age_seconds: float | None
    reason: str | None
    outcome: str | None
    error: str | None
    attempts: int | None
    replays: int
    expired: bool
    destination: str | None
    action: str
    why: str
    #: The message with its body, if ``peek`` was called with ``raw=True``.
    raw: DlqMessage | None = field(default=None, repr=False)


@dataclass
class Plan:
    """The prediction of a redrive that a peek has made.

    ``messages``: number of messages in the queue. ``looked_at``: how many of them the peek has
    received. ``matching`` and the histograms (``by_...``) count the selected messages. The keys of
    ``by_action`` say how a redrive would treat a message, and why. ``ready`` counts the selected
    messages that a redrive would send (or delete, with ``delete=True``). ``unknown`` counts
    messages that stay because their task may have been done already. ``not_given_back`` counts
    messages that SQS refused to show again. They stay hidden for up to 15 minutes.
    ``oldest_expires_in_seconds``: seconds until SQS deletes the oldest selected message.
    ``oldest_to_send_expires_in_seconds``: seconds until SQS deletes the oldest message to send.
    Each of these two is ``None`` if it is not known.
    """

    source: str
    messages: int
    looked_at: int = 0
    matching: int = 0
    ready: int = 0
    unknown: int = 0
    not_given_back: int = 0
    by_task: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    by_outcome: Counter[str] = field(default_factory=Counter)
    by_age: Counter[str] = field(default_factory=Counter)
    by_destination: Counter[str] = field(default_factory=Counter)
    by_action: Counter[str] = field(default_factory=Counter)
    oldest_expires_in_seconds: float | None = None
    oldest_to_send_expires_in_seconds: float | None = None
    rate: float | None = None
    ramp: float = 0.0
    limit: int | None = None
    letters: list[MessageFacts] = field(default_factory=list, repr=False)

    @property
    def to_send(self) -> int:
        """Estimate of how many messages a redrive would send or delete, at most ``limit``.

        It assumes that the share of ``ready`` messages among all messages of the queue is the same
        as among the received messages.
        """
        if not self.looked_at:
            return 0
        estimate = round(self.messages * self.ready / self.looked_at)
        return estimate if self.limit is None else min(self.limit, estimate)

    @property
    def duration_seconds(self) -> float | None:
        """Seconds that a redrive takes to send ``to_send`` messages. ``None`` without a rate."""
        return None if self.rate is None else seconds_for(self.to_send, self.rate, self.ramp)

    @property
    def is_too_late(self) -> bool:
        """Whether SQS would delete some messages before the redrive could send them."""
        return (
            self.duration_seconds is not None
            and self.oldest_to_send_expires_in_seconds is not None
            and self.duration_seconds > self.oldest_to_send_expires_in_seconds
        )


def peek(
    app: Celery,
    source: str,
    *,
    to: str | None = None,
    sample: int | None = DEFAULT_SAMPLE,
    raw: bool = False,
    copy: str | Path | None = None,
    stop: threading.Event | None = None,
    on_start: Callable[[], object] | None = None,
    **options: Any,
) -> Plan:
    """Receive messages of a dead-letter queue, predict a redrive, and let SQS show them again.

    Arguments:
        app, source, to, options: as for :func:`~celery_sqs_backoff.redrive`.
        sample: look at this number of messages at most. Default 1,000; ``None`` = all messages.
            Each is received once, which counts towards ``maxReceiveCount`` if the dead-letter
            queue has a redrive policy itself.
        raw: keep each message with its body, in ``raw`` of its entry in ``Plan.letters``.
        copy: append each selected message to this archive file. The message stays in the queue.
        stop: set it to end the peek early.
        on_start: is called after the queue was found, and before the first message is received.

    Raises:
        RedriveRefused: the queue does not exist, or a redrive with these options would be refused.
        RedriveUnreachable: SQS does not answer.
        OSError: the archive cannot be written, for example because the disk is full.
        ValueError: an option is invalid.
    """
    checked = RedriveOptions(**options)
    with open_route(app, source, checked, to=to) as route, ExitStack() as stack:
        write = None
        if copy is not None:
            archive = Archive(Path(copy), source=str(route.source.arn))
            write = stack.enter_context(archive).write
        if on_start is not None:
            on_start()
        return look_through(route, checked, sample, copy=write, raw=raw, stop=stop)


def look_through(
    route: Route,
    options: RedriveOptions,
    sample: int | None,
    *,
    copy: Callable[[Sequence[DlqMessage], Sequence[str | None]], None] | None = None,
    raw: bool = False,
    is_open_ended: bool = False,
    stop: threading.Event | None = None,
    now: Callable[[], float] = time.time,
    clock: Callable[[], float] = steady_seconds,
) -> Plan:
    """Receive messages of a dead-letter queue, predict a redrive, and let SQS show them again.

    Arguments:
        copy: is called with the selected messages of each receive, and the ARNs of their
            destinations.
        is_open_ended: look until the queue is empty. By default, look at as many messages as there
            were at the start, so that messages that arrive may take the places of others.
        now, clock: as for :class:`.halt.Halt`.

    The other arguments are as for :func:`peek`.
    """
    halt, source = Halt(stop, clock, now), route.source
    ledger = Ledger(NoJournal(), None, clock, _HOLD_SECONDS)
    plan = Plan(
        source.name,
        source.depth(),
        rate=options.rate,
        ramp=options.ramp or 0.0,
        limit=options.limit,
    )
    places = plan.messages if sample is None else min(plan.messages, sample)
    most = sys.maxsize if is_open_ended else places

    def handle(messages: list[DlqMessage], sent_before: list[DlqMessage]) -> None:
        at = now()
        triaged = [(m, triage(m, options, route.destination, at)) for m in messages]
        ledger.leave([(message, Action.SKIP, "looked at") for message in messages])
        selected = [(m, d) for m, d in triaged if d.reason != NOT_SELECTED]
        if copy is not None and selected:
            arns = [str(d.destination.arn) if d.destination else None for _, d in selected]
            copy([m for m, _ in selected], arns)
        with ledger.lock:
            plan.looked_at += len(messages)
            for message, disposition in selected:
                facts = _facts(message, disposition, route, at, raw=raw)
                _count(plan, facts, message, route.retention_seconds, at)
                if len(plan.letters) < _MOST_FACTS:
                    plan.letters.append(facts)

    sweep = Sweep(
        source,
        ledger,
        halt,
        handle,
        lambda: ledger.claim(MAX_BATCH_ENTRIES, most),
        hold_seconds=_HOLD_SECONDS,
        patient_until=clock(),
    )
    keeper = sweep.keep(lambda: None)
    try:
        sweep.run(1 if source.is_fifo else max(1, min(_MOST_THREADS, -(-places // 10))))
    finally:
        halt.finish()
        keeper.join()
        plan.not_given_back = sweep.give_all_back()
    if halt.error is not None:
        raise halt.error
    if halt.ended is Ended.UNREACHABLE:
        raise RedriveUnreachable(f"Cannot look at queue {plan.source}: {halt.detail}")
    return plan


def _facts(
    message: DlqMessage, disposition: Disposition, route: Route, now: float, *, raw: bool
) -> MessageFacts:
    destination = disposition.destination or route.destination(message)
    first_sent_at = message.first_sent_at
    return MessageFacts(
        id=message.id,
        task=message.task,
        task_id=message.task_id,
        age_seconds=None if first_sent_at is None else max(0.0, now - first_sent_at),
        reason=message.reason,
        outcome=message.outcome,
        error=message.error,
        attempts=message.record.attempts if message.record else None,
        replays=message.replays,
        expired=message.is_expired(now),
        destination=None if isinstance(destination, str) else destination.name,
        action=disposition.action.value,
        why=disposition.reason,
        raw=message if raw else None,
    )


def _count(
    plan: Plan, facts: MessageFacts, message: DlqMessage, retention: int | None, now: float
) -> None:
    is_ready = facts.action in (Action.SEND.value, Action.DROP.value)
    plan.matching += 1
    plan.ready += is_ready
    plan.unknown += facts.why == UNKNOWN
    for count, value in (
        (plan.by_task, facts.task or "(no Celery message)"),
        (plan.by_reason, facts.reason or "(no record: moved by SQS)"),
        (plan.by_outcome, facts.outcome or "(not known)"),
        (plan.by_age, _age_class(facts.age_seconds)),
        (plan.by_destination, facts.destination or "(not known: use --to)"),
        (plan.by_action, f"{facts.action}: {facts.why}" if facts.why else facts.action),
    ):
        count[value[:200]] += 1
    if message.sent_at is not None and retention:
        left = max(0.0, message.sent_at + retention - now)
        plan.oldest_expires_in_seconds = _least(plan.oldest_expires_in_seconds, left)
        if is_ready:
            oldest = plan.oldest_to_send_expires_in_seconds
            plan.oldest_to_send_expires_in_seconds = _least(oldest, left)


def _least(found: float | None, value: float) -> float:
    return value if found is None else min(found, value)


def _age_class(age: float | None) -> str:
    if age is None:
        return "unknown"
    return next(name for name, end in _AGES.items() if age < end)

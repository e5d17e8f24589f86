"""What is in a dead-letter queue, and what would a redrive of it be like? Nothing is changed.

Looking costs: each message looked at is received, which SQS counts, and is given back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError

from .broker import broker_of
from .errors import unreachable
from .letter import Letter
from .pace import seconds_for
from .route import Route, find_route
from .settings import Settings
from .source import QueueSource
from .units import spell_duration

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["AGES", "DEFAULT_SAMPLE", "LetterFacts", "Plan", "peek", "spell_expiry"]

DEFAULT_SAMPLE = 1_000

#: Hidden for as long as the look takes: a thousand messages in a hundred calls.
_HOLD_SECONDS = 60

_EMPTY_POLLS = 2

#: Upper ends of the age classes, in seconds.
AGES: Mapping[str, float] = {
    "under 1 h": 3_600,
    "1 h to 6 h": 21_600,
    "6 h to 1 d": 86_400,
    "1 d to 4 d": 345_600,
    "over 4 d": float("inf"),
}


@dataclass(frozen=True)
class LetterFacts:
    """One dead letter, without its body."""

    id: str
    task: str | None
    task_id: str | None
    content_type: str | None
    age_seconds: float | None
    reason: str | None
    error: str | None
    attempts: int | None
    replays: int
    expired: bool
    destination: str | None


@dataclass(frozen=True)
class Plan:
    """What was found in the first ``looked_at`` of ``messages`` messages.

    ``matching`` and the histograms count what the selection takes; ``ready``, those of them that
    would be sent (or deleted, if that is asked for): not expired and left, not replayed too often,
    and with a destination. ``duration_seconds`` is for all of these, estimated from the sample;
    ``None`` without a rate. ``oldest_expires_in_seconds``:
    until SQS deletes the oldest message looked at.
    """

    source: str
    messages: int
    looked_at: int
    matching: int
    ready: int
    by_task: Mapping[str, int]
    by_reason: Mapping[str, int]
    by_age: Mapping[str, int]
    by_destination: Mapping[str, int]
    expired: int
    replayed_out: int
    oldest_expires_in_seconds: float | None
    duration_seconds: float | None
    letters: tuple[LetterFacts, ...] = field(default=(), repr=False)
    #: The letters themselves, bodies and all, if they were asked for.
    raw: tuple[Letter, ...] = field(default=(), repr=False)

    @property
    def to_send(self) -> int:
        """Estimate of how many messages would be sent or deleted, from the share in the sample."""
        if not self.looked_at:
            return 0
        return round(self.messages * self.ready / self.looked_at)

    @property
    def is_too_late(self) -> bool:
        """Whether SQS would delete messages before their turn comes."""
        return (
            self.duration_seconds is not None
            and self.oldest_expires_in_seconds is not None
            and self.duration_seconds > self.oldest_expires_in_seconds
        )


def peek(
    app: Celery,
    source: str,
    *,
    to: str | None = None,
    sample: int = DEFAULT_SAMPLE,
    raw: bool = False,
    now: Callable[[], float] = time.time,
    **options: Any,
) -> Plan:
    """Look at the messages of a dead-letter queue, and give them back.

    Arguments:
        app: the Celery app whose SQS it is.
        source: name, URL or ARN of the dead-letter queue, or of a queue that has one.
        to: the destination that the redrive would have.
        sample: look at so many messages at the most. Default 1,000. Each is a receive, which counts
            towards a redrive policy of the dead-letter queue itself.
        raw: keep the letters with their bodies in ``Plan.raw``.
        options: as for :func:`~celery_sqs_backoff.redrive`.

    Raises:
        RedriveRefused: there is no such queue.
        RedriveUnreachable: SQS does not answer.
        ValueError: an option is not legal.
    """
    settings = Settings(**options)
    with broker_of(app) as broker:
        route = find_route(broker, source, to=to, force=settings.force)
        queue = QueueSource(route.source, hold_seconds=_HOLD_SECONDS)
        try:
            messages = queue.count()
            letters = list(_look(queue, min(messages, sample)))
        except (ClientError, BotoCoreError) as exc:
            raise unreachable(f"Cannot look at queue {queue.name}", exc) from exc
        finally:
            queue.give_all_back()
    return _plan(route, settings, messages, letters, raw, now())


def _look(queue: QueueSource, wanted: int) -> Iterator[Letter]:
    seen: set[str] = set()
    empty = 0
    while len(seen) < wanted and empty < _EMPTY_POLLS:
        letters = queue.receive(min(10, wanted - len(seen)))
        empty = 0 if letters else empty + 1
        for letter in letters:
            if letter.id not in seen:
                seen.add(letter.id)
                yield letter
        queue.renew()


def _plan(
    route: Route, settings: Settings, messages: int, letters: list[Letter], raw: bool, now: float
) -> Plan:
    matching = [letter for letter in letters if settings.selection.matches(letter, now)]
    facts = tuple(_facts(route, letter, now) for letter in matching)
    retention = route.queue.retention_seconds
    sent_at = [letter.sent_at for letter in letters if letter.sent_at is not None]
    plan = Plan(
        source=route.source.name,
        messages=messages,
        looked_at=len(letters),
        matching=len(matching),
        ready=sum(_is_ready(fact, settings) for fact in facts),
        by_task=_histogram(fact.task or "(no Celery message)" for fact in facts),
        by_reason=_histogram(fact.reason or "(no record: moved by SQS)" for fact in facts),
        by_age=_histogram(_age_class(fact.age_seconds) for fact in facts),
        by_destination=_histogram(fact.destination or "(not known: use --to)" for fact in facts),
        expired=sum(fact.expired for fact in facts),
        replayed_out=sum(fact.replays >= settings.max_replays for fact in facts),
        oldest_expires_in_seconds=(
            max(0.0, min(sent_at) + retention - now) if sent_at and retention else None
        ),
        duration_seconds=None,
        letters=facts,
        raw=tuple(matching) if raw else (),
    )
    if settings.rate is None:
        return plan
    count = min(plan.to_send, settings.limit or plan.to_send)
    duration = seconds_for(count, settings.rate, settings.ramp)
    return Plan(**{**vars(plan), "duration_seconds": duration})


def _is_ready(fact: LetterFacts, settings: Settings) -> bool:
    if fact.replays >= settings.max_replays:
        return False
    is_left = fact.expired and settings.expired != "extend"
    return settings.delete or (fact.destination is not None and not is_left)


def _facts(route: Route, letter: Letter, now: float) -> LetterFacts:
    destination = route.destination(letter)
    attempts = letter.record.get("attempts")
    return LetterFacts(
        id=letter.id,
        task=letter.task,
        task_id=letter.task_id,
        content_type=letter.envelope.content_type if letter.envelope else None,
        age_seconds=None if letter.sent_at is None else max(0.0, now - letter.sent_at),
        reason=letter.reason,
        error=letter.error,
        attempts=attempts if isinstance(attempts, int) else None,
        replays=letter.replayed.replays,
        expired=letter.is_expired(now),
        destination=destination.name if destination else None,
    )


def _age_class(age: float | None) -> str:
    if age is None:
        return "unknown"
    return next(name for name, end in AGES.items() if age < end)


def _histogram(values: Iterator[str] | Any) -> dict[str, int]:
    return dict(Counter(values).most_common())


def spell_expiry(plan: Plan) -> str | None:
    """``"oldest expires in 2 d 3 h"``."""
    if plan.oldest_expires_in_seconds is None:
        return None
    return f"oldest expires in {spell_duration(plan.oldest_expires_in_seconds)}"

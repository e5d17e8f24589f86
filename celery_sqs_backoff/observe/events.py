"""The events of a worker. Log lines, signals, metrics and status are folds over their stream.

A worker emits them in its main process, from any of its threads. They hold names, numbers and
reasons, never arguments, bodies or texts of exceptions. To add one, write its class here, emit it
where it happens, and give it a row in ``log_lines.LINES`` or ``metrics.INSTRUMENTS``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from ..text import error_site

logger = logging.getLogger(__name__)

#: The name of each task that is not registered, because senders can make up any number of names.
UNKNOWN_TASK: Final = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEvent:
    """An event on a queue.

    Attributes:
        name: of the kind. Its log line is ``sqs_backoff.<name>``. A counter of it has the name, or
            its plural, and so has a signal.
        queue: the queue's name.
    """

    name: ClassVar[str]
    queue: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Polled(WorkerEvent):
    """SQS answered a ReceiveMessage.

    Attributes:
        message_ids: SQS's ids of the messages that it returned.
    """

    name = "polled"
    message_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveFailed(WorkerEvent):
    """A ReceiveMessage failed.

    Attributes:
        code: SQS's error code, or the exception's name.
        failures: failures in a row on this queue, this one included.
    """

    name = "receive_failed"
    code: str
    failures: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivingAgain(WorkerEvent):
    """SQS answered a ReceiveMessage again, after ``failures`` in a row."""

    name = "receiving_again"
    failures: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OfMessage(WorkerEvent):
    """An event of one message, by SQS's id of it."""

    message_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OfTask(OfMessage):
    """An event of one message of a task.

    Attributes:
        task: the task's name.
        task_id: Celery's.
    """

    task: str
    task_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded(OfTask):
    """A run ended, with success or not.

    Attributes:
        outcome: ``"succeeded"``, or the outcome of the failure: ``"retryable"``,
            ``"not processed"``, ``"unknown"``.
        attempt: runs of the message so far, this one included.
    """

    name = "run"
    outcome: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retried(OfTask):
    """A run failed, and its message is hidden until the next attempt.

    Attributes:
        delay: seconds.
        attempt: runs of the message so far.
        outcome: as in :class:`RunEnded`.
        reason: how the run ended, such as "raised" or "process lost".
        error: the exception's type; ``None`` = not known.
        budget_left: seconds of ``retry_for``; ``None`` = no limit.
    """

    name = "retry"
    delay: float
    attempt: int
    outcome: str
    reason: str
    error: str | None = None
    budget_left: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLettered(OfTask):
    """The worker gave a message up.

    Attributes:
        reason: as in the dead-letter record.
        outcome: meaning of the last failure; ``None`` = not known.
        attempt: runs of the message.
        error: the exception's type; ``None`` = not known.
        is_kept: whether a dead-letter queue gets it; else it is deleted.
    """

    name = "dead_letter"
    reason: str
    outcome: str | None
    attempt: int
    error: str | None = None
    is_kept: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Discarded(OfTask):
    """The worker deleted a message because its task had expired or was revoked."""

    name = "discarded"


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageHidden(OfMessage):
    """The worker asks SQS to hide a message for a retry, an ETA, or a provider that is down.

    Attributes:
        seconds: for how long.
        sent_at: when the message was sent, in seconds since the epoch; ``None`` = not known.
        eta: when its task is due at the earliest, as its sender wished; ``None`` = immediately.
        gives_up_at: when ``retry_for`` is over, in seconds since the epoch; ``None`` = never.
    """

    name = "hidden"
    seconds: float
    sent_at: float | None = None
    eta: float | None = None
    gives_up_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled(WorkerEvent):
    """The worker asks SQS to show hidden messages now, because their provider is back.

    Attributes:
        message_ids: SQS's ids of them.
    """

    name = "recalled"
    message_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseLost(OfTask):
    """A task runs, and another worker may be running the same message."""

    name = "lease_lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewalRefused(OfMessage):
    """SQS refuses to renew a message that the worker holds.

    Attributes:
        code: SQS's error code.
    """

    name = "renewal_refused"
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldTooLong(OfMessage):
    """The worker holds a message for longer than the 12 hours that SQS allows."""

    name = "held_too_long"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettlementFailed(OfMessage):
    """The worker could not settle a message, which comes back or belongs to another worker.

    Attributes:
        action: that failed, such as "delete".
        code: SQS's error code; ``None``: the visibility timeout was over.
    """

    name = "settlement_failed"
    action: str
    code: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SettlementRefused(WorkerEvent):
    """SQS refuses an action until an operator acts. The worker tries it again, with long pauses.

    Attributes:
        action: that it refuses, such as "delete messages".
        code: SQS's error code.
    """

    name = "settlement_refused"
    action: str
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled(WorkerEvent):
    """SQS answered a batch call.

    Attributes:
        action: of SQS, such as "DeleteMessageBatch".
        failed: entries that SQS did not list as successful.
        code: the first error code, or ``None``.
    """

    name = "settled"
    action: str
    failed: int
    code: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OfProvider(WorkerEvent):
    """An event of a provider's gate in this worker. It has no queue.

    Attributes:
        state: of the provider from this event on, which the signal tells; ``None`` = no change.
        provider: the provider's name.
        tenant: a digest that stands for the tenant, if the provider has a key; else empty.
    """

    state: ClassVar[str | None] = None
    queue: str = ""
    provider: str
    tenant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderSlowed(OfProvider):
    """The provider is up and refuses calls, so they are limited. It was not paused before."""

    name, state = "provider_slowed", "recovering"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderPaused(OfProvider):
    """The provider seems to be down, so its messages are hidden without running."""

    name, state = "provider_paused", "paused"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderProbed(OfProvider):
    """One message runs to find out whether the provider is back."""

    name = "provider_probed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderRecovering(OfProvider):
    """The provider is back, and its calls are limited. Repeated each minute while they are.

    Attributes:
        rate: calls a second that this worker may make.
        waiting: messages that it has hidden, or that wait for their turn.
    """

    name, state = "provider_recovering", "recovering"
    rate: float
    waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderRecovered(OfProvider):
    """Calls have no limit again, and ``recalled`` messages were brought forward."""

    name, state = "provider_recovered", "ok"
    recalled: int


class Events:
    """Hands each event to every listener, in the thread that emits it.

    A listener must return quickly. If it raises, that is logged once per listener, and the
    other listeners are still called.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[WorkerEvent], object], ...] = ()
        self._broken: set[int] = set()

    def subscribe(self, listener: Callable[[WorkerEvent], object]) -> Callable[[], None]:
        """Call ``listener`` with every event. Return a function that removes it."""
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(other for other in self._listeners if other is not listener)

        return unsubscribe

    def emit(self, event: WorkerEvent) -> None:
        """Hand an event to all listeners. Never raises."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception as exc:  # noqa: BLE001
                # A broken observer must not hold up the message that it observes.
                if id(listener) not in self._broken:
                    self._broken.add(id(listener))
                    logger.error("sqs_backoff.listener_failed: %s: %s", event.name, error_site(exc))

"""Define the events of a worker. Log lines, signals, metrics and status are made from them.

A worker emits events in its main process, from any of its threads. Events hold names, numbers and
reasons, never arguments, bodies or texts of exceptions. To add an event, write its class here, emit
it in the worker, and give it a ``line``, or count it in ``metrics.INSTRUMENTS``.

To settle a message is to delete it, to hide it for a delay, or to send it to the dead-letter queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from logging import ERROR, INFO, WARNING
from typing import ClassVar, Final

from ..text import error_site

logger = logging.getLogger(__name__)

#: Events use this name for every task that is not registered. Senders can invent names, and each
#: name would add a time series to the metrics.
UNKNOWN_TASK: Final = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEvent:
    """An event of a worker, on one queue unless ``queue`` is empty.

    Attributes:
        name: name of this kind of event. Its log line begins with ``sqs_backoff.<name>``. Many
            counters and signals have the name of their event, or its plural.
        line: level and text of its log line; ``None`` = no line. The text may use the event's
            fields by their names, and ``facts``, the facts about its task.
        queue: the queue's name.
    """

    name: ClassVar[str]
    line: ClassVar[tuple[int, str] | None] = None
    queue: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Polled(WorkerEvent):
    """SQS answered a ReceiveMessage.

    Attributes:
        message_ids: SQS's IDs of the received messages.
    """

    name = "polled"
    message_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveFailed(WorkerEvent):
    """A ReceiveMessage failed.

    Attributes:
        code: SQS's error code, or the exception's name.
        failures: number of failures in a row on this queue, including this one.
    """

    name = "receive_failed"
    line = WARNING, "queue %(queue)s: %(code)s; trying again until it works"
    code: str
    failures: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivingAgain(WorkerEvent):
    """SQS answered a ReceiveMessage again, after ``failures`` failures in a row."""

    name = "receiving_again"
    line = INFO, "queue %(queue)s, after %(failures)s failure(s)"
    failures: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OfMessage(WorkerEvent):
    """An event of one message. ``message_id`` is SQS's ID of the message."""

    message_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OfTask(OfMessage):
    """An event of one message of a task.

    Attributes:
        task: the task's name.
        task_id: Celery's task ID.
    """

    task: str
    task_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded(OfTask):
    """A run of a task succeeded or failed.

    Attributes:
        outcome: ``"succeeded"``, or the outcome of the failure: ``"retryable"``,
            ``"not processed"``, ``"unknown"``.
        attempt: number of runs of the message so far, including this one.
    """

    name = "run"
    outcome: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retried(OfTask):
    """A run failed or was interrupted, and the task will run again.

    Attributes:
        delay: seconds until the next attempt; 0 = SQS shows the message immediately.
        attempt: number of runs of the message so far.
        outcome: as in :class:`RunEnded`.
        reason: how the run ended, such as "raised" or "process lost".
        error: the exception's type; ``None`` = not known.
        budget_left: seconds until ``retry_for`` is over; ``None`` = no limit.
    """

    name = "retry"
    line = INFO, "%(facts)s"
    delay: float
    attempt: int
    outcome: str
    reason: str
    error: str | None = None
    budget_left: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLettered(OfTask):
    """The worker gave a message up, so the task is not retried any more.

    Attributes:
        reason: why, as in the dead-letter record.
        outcome: outcome of the last failure; ``None`` = not known.
        attempt: number of runs of the message.
        error: the exception's type; ``None`` = not known.
        is_kept: whether the message goes to a dead-letter queue. ``False`` = it is deleted.
    """

    name = "dead_letter"
    line = WARNING, "%(facts)s"
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
    """The worker asks SQS to hide a message, for example for a retry, an ETA or a down provider.

    Attributes:
        seconds: seconds for which to hide the message.
        sent_at: when the message was sent, in seconds since the epoch; ``None`` = not known.
        eta: the task's ETA, in seconds since the epoch; ``None`` = no ETA.
        gives_up_at: when ``retry_for`` is over, in seconds since the epoch; ``None`` = never.
    """

    name = "hidden"
    seconds: float
    sent_at: float | None = None
    eta: float | None = None
    gives_up_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled(WorkerEvent):
    """The worker asks SQS to show hidden messages early.

    If the provider is down, one message is to run as a probe, which tests whether the provider
    works again. If the provider recovers, the worker brings the hidden messages back bit by bit.

    Attributes:
        message_ids: SQS's IDs of the messages.
    """

    name = "recalled"
    message_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseLost(OfTask):
    """The worker lost the message of a running task. Another worker may be running it, too."""

    name = "lease_lost"
    line = ERROR, "%(facts)s: another worker may be running it"


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewalRefused(OfMessage):
    """SQS refuses to renew the visibility timeout of a message that the worker holds.

    Attributes:
        code: SQS's error code.
    """

    name = "renewal_refused"
    line = WARNING, "this worker no longer holds message %(message_id)s of %(queue)s (%(code)s)"
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldTooLong(OfMessage):
    """The worker holds a message for longer than the 12 hours that SQS allows."""

    name = "held_too_long"
    line = ERROR, "message %(message_id)s of %(queue)s is held for longer than SQS allows"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettlementFailed(OfMessage):
    """The worker could not settle a message. SQS shows it again, or another worker has it.

    Attributes:
        action: the action that failed, such as "delete".
        code: SQS's error code; ``None`` = the visibility timeout was over.
    """

    name = "settlement_failed"
    line = WARNING, "cannot %(action)s message %(message_id)s on %(queue)s: %(code)s"
    action: str
    code: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SettlementRefused(WorkerEvent):
    """SQS refuses an action, for example because a permission is missing.

    The worker retries the action with growing pauses, until an operator removes the cause.

    Attributes:
        action: the refused action, such as "delete messages".
        code: SQS's error code.
    """

    name = "settlement_refused"
    line = (
        ERROR,
        "SQS refuses to %(action)s for queue %(queue)s (%(code)s); the worker tries again, and logs"
        " this once per queue",
    )
    action: str
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled(WorkerEvent):
    """A batch call to SQS has ended, with or without success.

    Attributes:
        action: SQS's name of the call, such as "DeleteMessageBatch".
        failed: number of entries that SQS did not list as successful.
        code: the first error code; ``None`` = no entry failed.
    """

    name = "settled"
    action: str
    failed: int
    code: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OfProvider(WorkerEvent):
    """An event of this worker's gate (circuit breaker) for a provider. Its ``queue`` is empty.

    Attributes:
        state: the provider's state after the event. If the state is new, the worker sends the
            signal ``provider_changed``. ``None`` = the event does not change the state.
        provider: the provider's name.
        tenant: a digest of the tenant; empty = no tenant.
    """

    state: ClassVar[str | None] = None
    queue: str = ""
    provider: str
    tenant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderSlowed(OfProvider):
    """The provider fails or refuses calls although it is up, so the worker limits calls to it."""

    name, state = "provider_slowed", "recovering"
    line = (
        WARNING,
        "%(provider)s: it fails or refuses calls; the worker limits its calls, starting at one a"
        " second",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderPaused(OfProvider):
    """The provider seems to be down, so the worker hides its messages without running them."""

    name, state = "provider_paused", "paused"
    line = WARNING, "%(provider)s: its messages are hidden without running, except for probes"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderProbed(OfProvider):
    """The worker runs one message to find out whether the provider works again."""

    name = "provider_probed"
    line = INFO, "%(provider)s: one message runs as a probe"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderRecovering(OfProvider):
    """The provider answers again, and the worker limits calls to it.

    The worker emits this event when the recovery begins, and then once a minute until it ends.
    After :class:`ProviderSlowed`, the worker also emits the event once a minute.

    Attributes:
        rate: calls a second that this worker may make.
        waiting: number of messages that the worker has hidden, or that wait in the worker until
            the rate lets them run.
    """

    name, state = "provider_recovering", "recovering"
    line = INFO, "%(provider)s: %(rate).1f calls a second, %(waiting)s messages wait"
    rate: float
    waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderRecovered(OfProvider):
    """The worker no longer limits calls to the provider.

    ``recalled``: number of hidden messages that the worker, during the recovery, asked SQS to show
    before their time.
    """

    name, state = "provider_recovered", "ok"
    line = (
        INFO,
        "%(provider)s: calls are not limited any more; %(recalled)s messages were brought forward",
    )
    recalled: int


class Events:
    """Calls every listener with each event, in the thread that emits the event.

    A listener must return quickly. If a listener raises, the other listeners are still called. Only
    the first error of each listener is logged.
    """

    def __init__(self, *listeners: Callable[[WorkerEvent], object]) -> None:
        self._listeners = listeners
        self._broken: set[int] = set()

    def subscribe(self, listener: Callable[[WorkerEvent], object]) -> None:
        """Call ``listener`` with every later event."""
        self._listeners = (*self._listeners, listener)

    def emit(self, event: WorkerEvent) -> None:
        """Call all listeners with an event. Never raises."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception as exc:  # noqa: BLE001
                # A faulty listener must not disturb the processing of the message.
                if id(listener) not in self._broken:
                    self._broken.add(id(listener))
                    logger.error("sqs_backoff.listener_failed: %s: %s", event.name, error_site(exc))

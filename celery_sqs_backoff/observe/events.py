"""What happens to messages, as values. Log lines, signals, metrics and status fold over these.

Events are emitted in the worker's main process, from whichever of its threads sees them happen.
They hold names, numbers and reasons, never arguments, bodies or texts of exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

#: In place of the name of a task that is not registered, of which there may be any number.
UNKNOWN_TASK: Final = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened on a queue.

    Attributes:
        queue: the queue's name.
    """

    name: ClassVar[str]
    queue: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Received(Event):
    """A ReceiveMessage brought messages.

    Attributes:
        messages: how many.
        asked_for: how many it could have brought.
        message_ids: SQS's ids of them.
    """

    name = "received"
    messages: int
    asked_for: int
    message_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveFailed(Event):
    """A ReceiveMessage failed.

    Attributes:
        code: SQS's error code, or the exception's name.
        failures: how many in a row have failed on this queue, this one included.
    """

    name = "receive failed"
    code: str
    failures: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivingAgain(Event):
    """A ReceiveMessage was answered after ``failures`` in a row that were not."""

    name = "receiving again"
    failures: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivingPaused(Event):
    """No ReceiveMessage is wanted: the only provider of the queue's tasks is down."""

    name = "receiving paused"


@dataclass(frozen=True, kw_only=True, slots=True)
class OfMessage(Event):
    """Something that happened to one message, by SQS's id of it."""

    message_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OfTask(OfMessage):
    """Something that happened to one message of a task.

    Attributes:
        task: the task's name.
        task_id: Celery's.
    """

    task: str
    task_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Started(OfTask):
    """A task was handed to the pool."""

    name = "started"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded(OfTask):
    """A run has ended, in whatever way.

    Attributes:
        outcome: ``"succeeded"``, or the outcome of the failure: ``"retryable"``,
            ``"not processed"``, ``"unknown"``.
        attempt: runs of the message so far, this one included.
    """

    name = "ended"
    outcome: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retried(OfTask):
    """A run has failed, and its message is hidden until the next attempt.

    Attributes:
        delay: seconds.
        attempt: runs of the message so far.
        outcome: as in :class:`RunEnded`.
        reason: how the run ended, such as "raised" or "process lost".
        error: the exception's type; ``None`` = not known.
        budget_left: seconds of ``retry_for``; ``None`` = no limit.
    """

    name = "retried"
    delay: float
    attempt: int
    outcome: str
    reason: str
    error: str | None = None
    budget_left: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLettered(OfTask):
    """A message was given up.

    Attributes:
        reason: as in the dead-letter record.
        outcome: what the last failure means; ``None`` = not known.
        attempt: runs of the message.
        error: the exception's type; ``None`` = not known.
        is_kept: whether a dead-letter queue gets it; else it is deleted.
    """

    name = "dead-lettered"
    reason: str
    outcome: str | None
    attempt: int
    error: str | None = None
    is_kept: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Parked(OfTask):
    """A message became a dead letter because too many of its queue are in flight."""

    name = "parked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Discarded(OfTask):
    """A message was deleted because its task had expired, or was revoked."""

    name = "discarded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden(OfMessage):
    """SQS is asked to hide a message: for a retry, an ETA, or a provider that is down.

    Attributes:
        seconds: for how long, from now on.
        sent_at: when the message was sent, in seconds since the epoch; ``None`` = not known.
        eta: when its task is due at the earliest, as its sender wished; ``None`` = at once.
        gives_up_at: when ``retry_for``, in seconds, is over, since the epoch; ``None`` = never.
    """

    name = "hidden"
    seconds: float
    sent_at: float | None = None
    eta: float | None = None
    gives_up_at: float | None = None
    retry_for: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BroughtForward(Event):
    """SQS is asked to show hidden messages at once, to any worker: their provider is back.

    Attributes:
        message_ids: SQS's ids of them.
    """

    name = "brought forward"
    message_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GaveBack(OfMessage):
    """A message that had not been started was given back."""

    name = "given back"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseLost(OfTask):
    """A task was handed to the pool, and another worker may be running its message by now."""

    name = "lease lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewalRefused(OfMessage):
    """SQS no longer honours the receipt handle of a held message.

    Attributes:
        code: SQS's error code.
    """

    name = "renewal refused"
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldTooLong(OfMessage):
    """A message is held for longer than the 12 hours that SQS allows."""

    name = "held too long"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettlementFailed(OfMessage):
    """A message could not be settled any more: it comes back, or another worker has it.

    Attributes:
        action: what was to be done, such as "delete".
        code: SQS's error code; ``None``: its visibility timeout was over.
    """

    name = "settlement failed"
    action: str
    code: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SettlementRefused(Event):
    """SQS refuses an action until a person has acted. It is tried again, with long pauses.

    Attributes:
        action: what was to be done, such as "delete messages".
        code: SQS's error code.
    """

    name = "settlement refused"
    action: str
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled(Event):
    """A batch call was answered.

    Attributes:
        operation: the SQS action.
        entries: entries of the batch, 1 to 10.
        failed: entries that SQS did not list as successful.
        code: the first error code, or ``None``.
        renewals: entries that only keep a running message hidden.
    """

    name = "settled"
    operation: str
    entries: int
    failed: int
    code: str | None = None
    renewals: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OfProvider(Event):
    """Something that happened to a provider's gate in this worker. Of no queue: it is empty.

    Attributes:
        provider: the provider's name.
        tenant: what stands for the tenant, if the provider has a key: a digest; else empty.
    """

    queue: str = ""
    provider: str
    tenant: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderSlowed(OfProvider):
    """The provider refuses calls and may be up: a rate limits them, from two a second on."""

    name = "provider slowed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderOpened(OfProvider):
    """The provider is taken to be down: its messages are hidden without running."""

    name = "provider opened"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderProbing(OfProvider):
    """One message runs, to see whether the provider is back."""

    name = "provider probing"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderClosed(OfProvider):
    """The provider is back; ``waiting`` messages will be brought forward."""

    name = "provider closed"
    waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderRecovered(OfProvider):
    """The calls are not limited any more; ``recalled`` messages were brought forward."""

    name = "provider recovered"
    recalled: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled(OfProvider):
    """So many hidden ``messages`` are brought forward."""

    name = "recalled"
    messages: int


#: Every kind of event, in the order of a message's life.
ALL: tuple[type[Event], ...] = (
    *(Received, ReceiveFailed, ReceivingAgain, ReceivingPaused),
    *(Started, RunEnded, Retried, Hidden, BroughtForward, DeadLettered, Parked, Discarded),
    *(GaveBack, LeaseLost, RenewalRefused, HeldTooLong),
    *(Settled, SettlementFailed, SettlementRefused),
    *(ProviderSlowed, ProviderOpened, ProviderProbing, ProviderClosed, Recalled, ProviderRecovered),
)

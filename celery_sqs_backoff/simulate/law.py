"""Decide about messages as workers do, with the package's own policies, budgets and gate.

No other module of the simulator contains rules for a provider's recovery.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from ..provider.gate import Message, ProviderGate
from ..retry import budget
from ..retry.decision import Reply
from ..sqs.delivery import Delivery
from ..sqs.hidden import Recall
from .scenario import Scenario


class SimulatedMessage:
    """One message. Times are seconds from the start of the simulation."""

    __slots__ = ("first_received_at", "id", "recall", "receives", "sent_at", "version")

    def __init__(self, number: int, sent_at: float) -> None:
        self.id = str(number)
        self.sent_at = sent_at
        self.first_received_at: float | None = None
        self.receives = 0
        #: Grows with each change of the visibility. An event with an older version is ignored.
        self.version = 0
        self.recall: Recall | None = None

    def mark_shown(self) -> None:
        """Remove the message from the hidden messages of its worker."""
        if self.recall is not None:
            self.recall.among.discard(self)


@dataclass(frozen=True, slots=True)
class SimulatedDecision:
    """A decision about a message. By default, the worker runs it.

    ``hide``: seconds to hide it. ``dead``: reason to give it up. ``waits``: let it wait for a slot.
    """

    hide: float | None = None
    dead: str | None = None
    waits: bool = False


RUN = SimulatedDecision()
WAIT = SimulatedDecision(waits=True)


class PolicyAlone:
    """Back off by the task's policy, without a provider."""

    name: ClassVar[str] = "full-jitter"

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self.scenario = scenario
        self.rng = rng

    def decide_on_receive(
        self, message: SimulatedMessage, now: float, waiting: int
    ) -> SimulatedDecision:
        """Decide about a received message. ``waiting``: number of messages that wait for a slot."""
        return (
            RUN
            if (reason := self._find_exhausted(message, now)) is None
            else SimulatedDecision(dead=reason)
        )

    def decide_after_run(
        self, message: SimulatedMessage, now: float, *, failed: bool, retry_after: float | None
    ) -> SimulatedDecision:
        """Decide about a message after its run.

        Arguments:
            failed: whether the run failed. After a success, the message is settled.
            retry_after: seconds that the provider asked to wait; ``None`` = it did not refuse.
        """
        if not failed:
            return RUN
        delay = self._draw(message) + (retry_after or 0.0)
        delay = self.adjust_delay(message, delay, now)
        reason = budget.find_reason(
            self._standing(message, now),
            max_retries=self.scenario.max_retries,
            retry_for=self.scenario.retry_for,
            delay=delay,
        )
        return (
            self._hide(message, delay, now)
            if reason is None
            else SimulatedDecision(dead=reason.value)
        )

    def adjust_delay(self, message: SimulatedMessage, delay: float, now: float) -> float:
        """Return the delay after a failure. ``delay``: seconds that the policy drew."""
        return delay

    def note_hidden(self, message: SimulatedMessage, until: float, now: float) -> None:
        """Record that SQS has hidden a message until a time."""

    def turns(self, waiting: int, now: float) -> int:
        """Return how many of the ``waiting`` messages get a slot now."""
        return waiting

    def decide_on_turn(
        self, message: SimulatedMessage, now: float, waiting: int
    ) -> SimulatedDecision:
        """Decide about a message that has waited, when it gets a slot or a free process.

        ``waiting``: number of messages that still wait for a slot.
        """
        return RUN

    def recalls(self, now: float, *, room: int, waiting: int) -> list[SimulatedMessage]:
        """Return hidden messages to bring forward now.

        ``room``: largest number. ``waiting``: number of messages that wait for a slot.
        """
        return []

    def tick_seconds(self) -> float | None:
        """Return the seconds after which to call ``recalls`` again. ``None`` = never."""
        return None

    def _draw(self, message: SimulatedMessage) -> float:
        return self.scenario.backoff.delay_for(message.id, max(1, message.receives), self.rng)

    def _hide(self, message: SimulatedMessage, delay: float, now: float) -> SimulatedDecision:
        seconds = self._delivery(message, now).visibility_delay(delay, now=now)
        return SimulatedDecision(hide=seconds)

    def _find_exhausted(self, message: SimulatedMessage, now: float) -> str | None:
        """Return the budget that is exhausted, as a reason to give up, or ``None``."""
        if message.receives <= 1:
            return None
        reason = budget.find_reason_before_run(
            self._standing(message, now),
            max_retries=self.scenario.max_retries,
            retry_for=self.scenario.retry_for,
            crashes=0,
            crash_budget=self.scenario.crash_budget,
        )
        return None if reason is None else reason.value

    def _standing(self, message: SimulatedMessage, now: float) -> budget.Standing:
        # A worker does not know whether another worker hid the message without running it, so each
        # receive counts as a retry.
        return self._delivery(message, now).standing(retries=message.receives - 1, now=now)

    def _delivery(self, message: SimulatedMessage, now: float) -> Delivery:
        return Delivery(
            message_id=message.id,
            queue_url="",
            received_at=now,
            receive_count=message.receives,
            first_received_at=message.first_received_at,
            sent_at=message.sent_at,
            max_receive_count=self.scenario.max_receive_count,
            retention_seconds=int(self.scenario.retention),
        )


class WithProvider(PolicyAlone):
    """Let one probe run while the provider is down, and bring messages forward afterwards."""

    name = "provider"

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        super().__init__(scenario, rng)
        provider = scenario.provider
        self.gate = ProviderGate(
            rng, failures=provider.failures, probe_interval=provider.probe_interval
        )
        self._reply: Reply | None = None
        self._floor = 0.0
        self._recall: Recall | None = None

    def decide_on_receive(
        self, message: SimulatedMessage, now: float, waiting: int
    ) -> SimulatedDecision:
        if (reason := self._find_exhausted(message, now)) is not None:
            return SimulatedDecision(dead=reason)
        look = self.gate.arrived(self._seen(message, now), now, waiting=waiting)
        if look.hide_seconds is None:
            return WAIT if look.waits else RUN
        self._recall = look.recall
        return self._hide(message, look.hide_seconds, now)

    def decide_after_run(
        self, message: SimulatedMessage, now: float, *, failed: bool, retry_after: float | None
    ) -> SimulatedDecision:
        failure = Reply.FAILED if retry_after is None else Reply.REFUSED
        self._reply = failure if failed else Reply.ANSWERED
        self.gate.ended(message.id, self._reply, now, retry_after=retry_after)
        self._floor = retry_after or 0.0
        return super().decide_after_run(message, now, failed=failed, retry_after=retry_after)

    def adjust_delay(self, message: SimulatedMessage, delay: float, now: float) -> float:
        seen = self._seen(message, now)
        look = self.gate.failed(seen, self._reply, delay, now, floor=self._floor)
        self._recall = look.recall
        return look.hide_seconds or 0.0

    def note_hidden(self, message: SimulatedMessage, until: float, now: float) -> None:
        message.recall = self._recall
        if message.recall is not None:
            self.gate.hidden.add(message, until, message.recall, now)

    def turns(self, waiting: int, now: float) -> int:
        return self.gate.turns(waiting, now)

    def decide_on_turn(
        self, message: SimulatedMessage, now: float, waiting: int
    ) -> SimulatedDecision:
        if self.gate.begins(message.id, now):
            return RUN
        return self.decide_on_receive(message, now, waiting)

    def recalls(self, now: float, *, room: int, waiting: int) -> list[SimulatedMessage]:
        return self.gate.recalls(now, room=room, waiting=waiting)

    def tick_seconds(self) -> float | None:
        return self.gate.seconds_to_look

    def _seen(self, message: SimulatedMessage, now: float) -> Message:
        return Message.of(
            self._delivery(message, now),
            self.scenario.provider,
            self.scenario.backoff,
            retry_for=self.scenario.retry_for,
            rng=self.rng,
            now=now,
        )


STRATEGIES: dict[str, type[PolicyAlone]] = {one.name: one for one in (PolicyAlone, WithProvider)}

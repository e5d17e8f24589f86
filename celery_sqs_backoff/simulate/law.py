"""Decide about messages as workers do, with the package's own policies, budgets and gate.

No other module of the simulator contains rules for a provider's recovery.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from ..provider.gate import Look, Message, ProviderGate
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


@dataclass(frozen=True, slots=True)
class SimulatedDecision:
    """A decision about a message. By default, the worker runs it.

    ``hide``: seconds to hide it. ``recall``: the permission to bring it forward while it is hidden.
    ``dead``: reason to give it up. ``waits``: it waits in the worker for its turn.
    """

    hide: float | None = None
    recall: Recall | None = None
    dead: str | None = None
    waits: bool = False


RUN = SimulatedDecision()
WAIT = SimulatedDecision(waits=True)


class Law:
    """Decides for one worker, by the task's policy alone or also by a provider's gate.

    Args:
        scenario: gives the task's options.
        rng: draws delays.
        has_gate: whether the task has a provider.
    """

    def __init__(self, scenario: Scenario, rng: Random, *, has_gate: bool) -> None:
        self._scenario, self._rng = scenario, rng
        self.gate: ProviderGate | None = None
        if has_gate:
            provider = scenario.provider
            self.gate = ProviderGate(
                rng, failures=provider.failures, probe_interval=provider.probe_interval
            )

    def decide_on_receive(
        self, message: SimulatedMessage, now: float, waiting: int
    ) -> SimulatedDecision:
        """Decide about a received message. ``waiting``: number of messages that wait for a turn."""
        if message.receives > 1:
            reason = budget.find_reason_before_run(
                self._standing(message, now),
                max_retries=self._scenario.max_retries,
                retry_for=self._scenario.retry_for,
                crashes=0,
                crash_budget=self._scenario.crash_budget,
            )
            if reason is not None:
                return SimulatedDecision(dead=reason.value)
        if self.gate is None:
            return RUN
        look = self.gate.arrived(self._seen(message, now), now, waiting=waiting)
        if look.hide_seconds is None:
            return WAIT if look.waits else RUN
        return self._hide(message, look, now)

    def decide_on_turn(
        self, message: SimulatedMessage, now: float, waiting: int
    ) -> SimulatedDecision:
        """Decide about a message now that its turn has come, or a process is free for it."""
        if self.gate is None or self.gate.begins(message.id, now):
            return RUN
        return self.decide_on_receive(message, now, waiting)

    def decide_after_run(
        self, message: SimulatedMessage, now: float, reply: Reply, retry_after: float | None
    ) -> SimulatedDecision:
        """Decide about a message after its run. After a success, the result has no meaning."""
        if self.gate is not None:
            self.gate.ended(message.id, reply, now, retry_after=retry_after)
        if reply is Reply.ANSWERED:
            return RUN
        floor = retry_after or 0.0
        drawn = self._scenario.backoff.delay_for(message.id, message.receives, self._rng)
        look = Look(drawn + floor)
        if self.gate is not None:
            seen = self._seen(message, now)
            look = self.gate.failed(seen, reply, drawn + floor, now, floor=floor)
        reason = budget.find_reason(
            self._standing(message, now),
            max_retries=self._scenario.max_retries,
            retry_for=self._scenario.retry_for,
            delay=look.hide_seconds or 0.0,
        )
        if reason is not None:
            return SimulatedDecision(dead=reason.value)
        return self._hide(message, look, now)

    def _hide(self, message: SimulatedMessage, look: Look, now: float) -> SimulatedDecision:
        delivery = self._delivery(message, now)
        seconds = delivery.visibility_delay(look.hide_seconds or 0.0, now=now)
        return SimulatedDecision(hide=seconds, recall=look.recall)

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
            max_receive_count=self._scenario.max_receive_count,
            retention_seconds=int(self._scenario.retention),
        )

    def _seen(self, message: SimulatedMessage, now: float) -> Message:
        return Message.of(
            self._delivery(message, now),
            self._scenario.provider,
            self._scenario.backoff,
            retry_for=self._scenario.retry_for,
            rng=self._rng,
            now=now,
        )

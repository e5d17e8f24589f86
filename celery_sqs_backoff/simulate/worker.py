"""Decide about messages as workers do, with the package's own policies, budgets and gate.

The gate is the circuit breaker of a provider in one worker. No other module of the simulator
contains rules for a provider's recovery.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

from ..provider.gate import ProviderGate
from ..provider.holds import Look, Message
from ..provider.settings import Provider
from ..retry import budget
from ..retry.budget import GiveUpReason
from ..retry.decision import Reply
from ..sqs.delivery import Delivery
from ..sqs.hidden import Recall
from .scenario import Scenario

#: What to do with a message: run it, hide it, let it wait in the worker, or give it up.
Decision: TypeAlias = Look | GiveUpReason

RUN: Final = Look()


@dataclass(slots=True, eq=False)
class SimulatedMessage:
    """One message. Times are seconds from the start of the simulation.

    Attributes:
        delivery: the message's last receive. Before the first receive, ``receive_count`` is 0.
        hidden_until: when SQS shows the message again; ``None`` = the message is not hidden.
        recall: the gate's permission to show the message early, from the decision that last hid the
            message; ``None`` = no permission.
    """

    delivery: Delivery
    hidden_until: float | None = None
    recall: Recall | None = None


class SimulatedWorker:
    """One worker, with the messages that it holds.

    Args:
        scenario: gives the task's options and the size of the worker.
        rng: draws delays.
        has_gate: whether the task has a provider, and so a gate. If not, only the task's delay
            policy decides about a failed message.
    """

    def __init__(self, scenario: Scenario, rng: Random, *, has_gate: bool) -> None:
        self._options, self._rng = scenario.options, rng
        provider = self._options.provider
        self._provider = provider if isinstance(provider, Provider) else Provider("simulated")
        self.gate: ProviderGate | None = None
        if has_gate:
            self.gate = ProviderGate(
                rng,
                failures=self._provider.failures,
                probe_interval=self._provider.probe_interval,
            )
        self.running = 0
        self.room = scenario.window  # number of further messages that the worker can hold
        self.waiting: deque[SimulatedMessage] = deque()  # messages that wait for a process
        self.paced: deque[SimulatedMessage] = deque()  # messages that the gate lets run later
        self.ticks_at = math.inf

    def decide_on_receive(self, message: SimulatedMessage, now: float) -> Decision:
        """Decide about a received message."""
        reason = budget.find_reason_before_run(
            self._standing(message, now),
            max_retries=self._options.max_retries,
            retry_for=self._options.retry_for,
            crashes=0,
            crash_budget=self._options.crash_budget,
        )
        if reason is not None:
            return reason
        if self.gate is None:
            return RUN
        look = self.gate.arrived(self._describe(message, now), now, waiting=len(self.paced))
        return RUN if look.is_probe else look

    def decide_on_turn(self, message: SimulatedMessage, now: float) -> Decision:
        """Decide about a waiting message when its turn has come, or when a process is free."""
        if self.gate is None or self.gate.begins(message.delivery.message_id, now):
            return RUN
        return self.decide_on_receive(message, now)

    def decide_after_run(
        self, message: SimulatedMessage, now: float, reply: Reply
    ) -> Decision | None:
        """Decide about a message after its run. Return ``None`` after a success."""
        delivery = message.delivery
        if self.gate is not None:
            self.gate.ended(delivery.message_id, reply, now)
        if reply is Reply.ANSWERED:
            return None
        delay = self._options.backoff.delay_for(
            delivery.message_id, delivery.receive_count, self._rng
        )
        look = Look(delay)
        if self.gate is not None:
            look = self.gate.failed(self._describe(message, now), reply, delay, now, floor=0.0)
        reason = budget.find_reason(
            self._standing(message, now),
            max_retries=self._options.max_retries,
            retry_for=self._options.retry_for,
            delay=look.hide_seconds or 0.0,
        )
        return reason or look

    def _standing(self, message: SimulatedMessage, now: float) -> budget.Standing:
        # A worker does not know whether another worker hid the message without running it, so each
        # receive counts as a retry.
        return message.delivery.standing(retries=message.delivery.earlier_runs, now=now)

    def _describe(self, message: SimulatedMessage, now: float) -> Message:
        return Message.of(
            message.delivery,
            self._provider,
            self._options.backoff,
            retry_for=self._options.retry_for,
            rng=self._rng,
            now=now,
        )

"""How workers decide about messages, with the package's own policies, budgets and gate.

This is the only module of the simulator that knows the law of the provider's recovery.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from ..provider.control import Control
from ..provider.health import State
from ..provider.rate import longest_wait
from ..provider.recall import Hidden, probe_from
from ..retry import budget
from ..retry.outcomes import Outcome
from ..retry.policies import Schedule
from ..sqs.delivery import Delivery
from ..sqs.visibility import standing, visibility_delay
from .scenario import Scenario


class SimulatedMessage:
    """One message. Times are seconds from the start of the simulation."""

    __slots__ = ("first_received_at", "id", "receives", "sent_at", "version")

    def __init__(self, number: int, sent_at: float) -> None:
        self.id = str(number)
        self.sent_at = sent_at
        self.first_received_at: float | None = None
        self.receives = 0
        #: Grows with each change of its visibility, which voids events of an older one.
        self.version = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What to do with a message: run it (the default), hide it, let it wait, or give it up."""

    hide: float | None = None
    dead: str | None = None
    waits: bool = False


RUN = Told()
WAIT = Told(waits=True)


class PolicyAlone:
    """Back off by the task's policy alone."""

    name: ClassVar[str] = "full-jitter"

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self.scenario = scenario
        self.rng = rng

    def received(self, message: SimulatedMessage, now: float, waiting: int) -> Told:
        """Decide about a message that has come due, while others wait for their turn."""
        return RUN if (reason := self._exhausted(message, now)) is None else Told(dead=reason)

    def ended(
        self, message: SimulatedMessage, now: float, *, failed: bool, retry_after: float | None
    ) -> Told:
        """Decide about a message whose run has ended; after a success nothing is to do."""
        if not failed:
            return RUN
        delay = self._draw(message) + (retry_after or 0.0)
        delay = self.delayed(message, delay, now)
        reason = budget.exhausted(
            self._standing(message, now),
            max_retries=self.scenario.max_retries,
            retry_for=self.scenario.retry_for,
            delay=delay,
        )
        return self._hide(message, delay, now) if reason is None else Told(dead=reason.value)

    def has_retried(self, message: SimulatedMessage) -> float:
        """Let a message fail from when it was sent until 0; return when it is due again."""
        message.first_received_at = at = message.sent_at
        most = self.scenario.max_receive_count
        while at < 0:
            if most is None or message.receives < most - 1:  # else it would not be there
                message.receives += 1
            delay = self.delayed(message, self._draw(message), at)
            at += max(1.0, self._hide(message, delay, at).hide or 0.0)
        return at

    def down_since(self, at: float) -> None:
        """Note that the provider was down before the simulation begins."""

    def delayed(self, message: SimulatedMessage, delay: float, now: float) -> float:
        """Return the delay after a failure, from the one that the policy drew."""
        return delay

    def hidden(self, message: SimulatedMessage, until: float, now: float) -> None:
        """Note that SQS has hidden a message."""

    def turns(self, waiting: int, now: float) -> int:
        """Return how many of those that wait may run now."""
        return waiting

    def turn_came(self, message: SimulatedMessage, now: float, waiting: int) -> Told:
        """Decide about a message whose turn has come, with so many behind it."""
        return RUN

    def recalls(self, now: float, *, room: int, waiting: int) -> list[SimulatedMessage]:
        """Return the messages to bring forward now."""
        return []

    def tick_seconds(self) -> float | None:
        """Return the seconds until ``recalls`` is worth asking; ``None`` = never."""
        return None

    def _draw(self, message: SimulatedMessage) -> float:
        return self.scenario.backoff.delay_for(message.id, max(1, message.receives), self.rng)

    def _hide(self, message: SimulatedMessage, delay: float, now: float) -> Told:
        return Told(hide=visibility_delay(delay, self._delivery(message, now), now=now))

    def _exhausted(self, message: SimulatedMessage, now: float) -> str | None:
        """Return the budget that was exhausted before this receive; ``None`` = it may run."""
        if message.receives <= 1:
            return None
        reason = budget.exhausted_before_run(
            self._standing(message, now),
            max_retries=self.scenario.max_retries,
            retry_for=self.scenario.retry_for,
            crashes=0,
            crash_budget=self.scenario.crash_budget,
        )
        return None if reason is None else reason.value

    def _standing(self, message: SimulatedMessage, now: float) -> budget.Standing:
        # A worker does not know what another has hidden without running, so receives count.
        return standing(self._delivery(message, now), retries=message.receives - 1, now=now)

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
        self.control = Control(scenario.provider.thresholds, rng)
        self._hidden: dict[str, SimulatedMessage] = {}
        is_recalled = scenario.provider.recall
        if is_recalled is None:
            is_recalled = not isinstance(scenario.backoff, Schedule)
        self._is_recallable = is_recalled
        self._retry_after: float | None = None
        self._keeps_its_delay = False
        self._own_delay = 0.0

    def received(self, message: SimulatedMessage, now: float, waiting: int) -> Told:
        self._hidden.pop(message.id, None)
        if (reason := self._exhausted(message, now)) is not None:
            self.control.gone(message.id)
            return Told(dead=reason)
        self._retry_after, self._keeps_its_delay = None, False
        if self.control.is_quiet:
            self.control.look_quietly(message.id, now)
            return RUN
        # At the receive after the last one the queue would move it.
        must_stay = message.receives == self.scenario.max_receive_count
        longest = self._longest_hold(message, now)
        longest_here = longest_wait(is_returned=message.receives > 1, must_stay=must_stay)
        look = self.control.look(
            message.id,
            now,
            policy=self.scenario.backoff,
            looks=message.receives,
            longest=max(1.0, longest),
            ahead=waiting,
            longest_wait=longest_here if longest > 0 else 0.0,
            recallable=self._is_recallable,
            is_last=longest <= 0 or must_stay,
        )
        if look.hide_seconds is None:
            return WAIT if look.waits else RUN
        self._own_delay = self._draw(message)
        return self._hide(message, look.hide_seconds, now)

    def ended(
        self, message: SimulatedMessage, now: float, *, failed: bool, retry_after: float | None
    ) -> Told:
        outcome = Outcome.RETRYABLE if failed else None
        self.control.ended(message.id, outcome, now, retry_after=retry_after)
        self._retry_after = retry_after
        self._keeps_its_delay = failed and self.control.keeps_its_delay(message.id)
        return super().ended(message, now, failed=failed, retry_after=retry_after)

    def down_since(self, at: float) -> None:
        self.control.told_open(at, 0.0)

    def delayed(self, message: SimulatedMessage, delay: float, now: float) -> float:
        self._own_delay = delay
        may_come_soon = self._delivery(message, now).has_receives_to_spare
        comes_soon = may_come_soon and not self._keeps_its_delay
        return self.control.delay_after_failure(
            message.id,
            delay,
            now,
            floor=self._retry_after or 0.0 if comes_soon else delay,
            policy=self.scenario.backoff,
            looks=message.receives,
            longest=max(delay, self._longest_hold(message, now)),
            recallable=self._is_recallable,
        )

    def hidden(self, message: SimulatedMessage, until: float, now: float) -> None:
        if not self._is_recallable:
            return
        not_before = until if self._keeps_its_delay else now + (self._retry_after or 0.0)
        self._retry_after, self._keeps_its_delay = None, False
        delivery = self._delivery(message, now)
        hidden = Hidden(
            message.id,
            handle="",
            queue="",
            until=until,
            not_before=not_before,
            next_is_last=delivery.is_next_the_last,
            receives=message.receives,
            probe_from=probe_from(delivery, now + self._own_delay),
        )
        if self.control.hidden(hidden, now):
            self._hidden[message.id] = message

    def turns(self, waiting: int, now: float) -> int:
        return self.control.turns(waiting, now)

    def turn_came(self, message: SimulatedMessage, now: float, waiting: int) -> Told:
        if self.control.health.state is not State.CLOSED:
            return self.received(message, now, waiting)
        self.control.look_quietly(message.id, now)
        return RUN

    def recalls(self, now: float, *, room: int, waiting: int) -> list[SimulatedMessage]:
        recalled = self.control.recalls(now, room=room, waiting=waiting)
        return [self._hidden.pop(hidden.message_id) for hidden in recalled]

    def tick_seconds(self) -> float | None:
        return self.control.seconds_to_look

    def _longest_hold(self, message: SimulatedMessage, now: float) -> float:
        retry_for = self.scenario.retry_for
        return budget.longest_hold(self._standing(message, now), retry_for=retry_for)


STRATEGIES: dict[str, type[PolicyAlone]] = {one.name: one for one in (PolicyAlone, WithProvider)}

"""How a fleet behaves: what ``--compare`` compares. Each worker has one of these."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from ..provider.control import Control
from ..provider.health import State
from ..provider.rate import longest_wait
from ..provider.recall import Hidden, probe_from
from ..retry.outcomes import Outcome
from ..retry.policies import Schedule
from . import budgets
from .message import Message
from .scenario import Scenario

__all__ = ["STRATEGIES", "Strategy", "Told"]


@dataclass(frozen=True, slots=True)
class Told:
    """What to do with a message: run it (the default), hide it, let it wait, or call it dead."""

    hide: float | None = None
    dead: str | None = None
    waits: bool = False


RUN = Told()
WAIT = Told(waits=True)


class Strategy:
    """Backoff by the task's policy: full jitter, unless the scenario says otherwise."""

    name: ClassVar[str] = "full-jitter"

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        self.scenario = scenario
        self.task = scenario.task
        self.rng = rng

    def received(self, message: Message, now: float, waiting: int) -> Told:
        """Decide about a message that has come due, while others wait for their turn."""
        if message.receives > 1:
            reason = budgets.exhausted_before_run(self.scenario, message, now)
            if reason is not None:
                return Told(dead=reason)
        return RUN

    def ended(
        self, message: Message, outcome: Outcome | None, now: float, retry_after: float | None
    ) -> Told:
        """Decide about a message whose run has ended; on success the answer is not used."""
        if outcome is None:
            return RUN
        delay = self.task.backoff.delay_for(message.id, message.receives, self.rng)
        delay += retry_after or 0.0
        delay = self.delayed(message, delay, now)
        reason = budgets.exhausted(self.scenario, message, now, delay)
        if reason is not None:
            return Told(dead=reason)
        return Told(hide=budgets.visibility_delay(self.scenario, message, now, delay))

    def down_since(self, at: float) -> None:
        """Note that the provider was down before the simulation begins."""

    def has_retried(self, message: Message) -> float:
        """Let a message have failed since it was sent; return the seconds until it is due again."""
        message.first_received_at = at = message.sent_at
        most = self.scenario.max_receive_count
        while at < 0:
            if most is None or message.receives < most - 1:  # else it would not be there
                message.receives += 1
            delay = self.task.backoff.delay_for(message.id, max(1, message.receives), self.rng)
            delay = self.delayed(message, delay, at)
            at += max(1.0, budgets.visibility_delay(self.scenario, message, at, delay))
        message.runs = message.receives
        return at

    def delayed(self, message: Message, delay: float, now: float) -> float:
        """Return the delay after a failure, from the one that the policy drew."""
        return delay

    def hidden(self, message: Message, until: float, now: float) -> None:
        """Note that SQS has hidden a message."""

    def turns(self, waiting: int, now: float) -> int:
        """Return how many of those that wait may run now."""
        return waiting

    def turn_came(self, message: Message, now: float, waiting: int) -> Told:
        """Decide about a message whose turn has come, with so many behind it."""
        return RUN

    def recalls(self, now: float, *, room: int, waiting: int) -> list[Message]:
        """Return the messages to bring forward now."""
        return []

    def tick_seconds(self, now: float) -> float | None:
        """Return the seconds until ``recalls`` is worth asking; ``None`` = never."""
        return None


class Autoretry(Strategy):
    """Celery's ``autoretry_for`` with ``retry_backoff=True``: copies with a countdown.

    ``min(600, 2**retries)`` seconds, jittered, and three retries, unless the scenario says
    otherwise (celery/app/autoretry.py, celery/utils/time.py ``get_exponential_backoff_interval``).
    """

    name = "autoretry"

    def received(self, message: Message, now: float, waiting: int) -> Told:
        return RUN

    def ended(
        self, message: Message, outcome: Outcome | None, now: float, retry_after: float | None
    ) -> Told:
        if outcome is None:
            return RUN
        if message.runs > self.task.autoretry_max_retries:
            return Told(dead="Celery's max_retries exceeded")
        longest = min(self.task.autoretry_backoff_max, 2 ** (message.runs - 1))
        return Told(hide=float(max(1, self.rng.randrange(int(longest) + 1))))


class Gate(Strategy):
    """The policy, and the provider's gate: nothing runs while the provider is down."""

    name = "gate"
    remembers: ClassVar[bool] = False

    def __init__(self, scenario: Scenario, rng: Random) -> None:
        super().__init__(scenario, rng)
        limit = self.task.remember if self.remembers else 0
        self.control = Control(self.task.thresholds, rng, limit=limit)
        self._hidden: dict[str, Message] = {}
        self._is_recallable = not isinstance(self.task.backoff, Schedule)
        self._retry_after: float | None = None
        self._keeps_its_delay = False
        self._own_delay = 0.0

    def received(self, message: Message, now: float, waiting: int) -> Told:
        self._hidden.pop(message.id, None)
        if message.receives > 1:
            reason = budgets.exhausted_before_run(self.scenario, message, now)
            if reason is not None:
                self.control.gone(message.id)
                return Told(dead=reason)
        control = self.control
        self._retry_after, self._keeps_its_delay = None, False
        if control.is_quiet:
            control.look_quietly(message.id, now)
            return RUN
        # At the receive after the last one the queue would move it.
        must_stay = message.receives == self.scenario.max_receive_count
        longest = budgets.longest_hold(self.scenario, message, now)
        longest_here = longest_wait(
            is_returned=message.receives > 1, is_alone=False, must_stay=must_stay
        )
        look = control.look(
            message.id,
            now,
            policy=self.task.backoff,
            looks=message.receives,
            longest=max(1.0, longest),
            ahead=waiting,
            longest_wait=longest_here if longest > 0 else 0.0,
            recallable=self._is_recallable,
            is_last=longest <= 0 or must_stay,
        )
        if look.hide_seconds is None:
            return WAIT if look.waits else RUN
        self._own_delay = self.task.backoff.delay_for(message.id, message.receives, self.rng)
        return Told(hide=budgets.visibility_delay(self.scenario, message, now, look.hide_seconds))

    def down_since(self, at: float) -> None:
        self.control.told_open(at, 0.0)

    def turns(self, waiting: int, now: float) -> int:
        return self.control.turns(waiting, now)

    def turn_came(self, message: Message, now: float, waiting: int) -> Told:
        if self.control.health.state is not State.CLOSED:
            return self.received(message, now, waiting)
        self.control.look_quietly(message.id, now)
        return RUN

    def ended(
        self, message: Message, outcome: Outcome | None, now: float, retry_after: float | None
    ) -> Told:
        self.control.ended(message.id, outcome, now, retry_after=retry_after)
        self._retry_after = retry_after
        self._keeps_its_delay = outcome is not None and self.control.keeps_its_delay(message.id)
        return super().ended(message, outcome, now, retry_after)


class Recall(Gate):
    """The gate, and recall: what a worker has hidden it brings forward after the outage."""

    name = "gate+recall"
    remembers = True

    def hidden(self, message: Message, until: float, now: float) -> None:
        if not self._is_recallable:
            return
        not_before = until if self._keeps_its_delay else now + (self._retry_after or 0.0)
        self._retry_after, self._keeps_its_delay = None, False
        delivery = budgets.delivery(self.scenario, message, now)
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
            if len(self._hidden) > 2 * self.task.remember:
                kept = {hidden.message_id for hidden in self.control.memory}
                self._hidden = {k: v for k, v in self._hidden.items() if k in kept}

    def delayed(self, message: Message, delay: float, now: float) -> float:
        self._own_delay = delay
        delivery = budgets.delivery(self.scenario, message, now)
        comes_soon = delivery.has_receives_to_spare and not self._keeps_its_delay
        return self.control.delay_after_failure(
            message.id,
            delay,
            now,
            floor=self._retry_after or 0.0 if comes_soon else delay,
            policy=self.task.backoff,
            looks=message.receives,
            longest=max(delay, budgets.longest_hold(self.scenario, message, now)),
            recallable=self._is_recallable,
        )

    def recalls(self, now: float, *, room: int, waiting: int) -> list[Message]:
        recalled = self.control.recalls(now, room=room, waiting=waiting)
        return [self._hidden.pop(hidden.message_id) for hidden in recalled]

    def tick_seconds(self, now: float) -> float | None:
        return self.control.seconds_to_look


STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (Autoretry, Strategy, Gate, Recall)
}

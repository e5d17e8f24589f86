"""One provider in one worker: may a message run, how did its run end, how long is it hidden?"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, Protocol

from ..observe.stream import Events
from ..provider.control import Control
from ..provider.health import State
from ..provider.rate import LATEST_SECONDS, longest_wait
from ..provider.recall import DEFAULT_LIMIT
from ..provider.settings import Provider
from ..retry.budget import Standing, exhausted_before_run, longest_hold, tolerant
from ..retry.decision import End, Ended, Reply, RetryIn
from ..retry.options import Options
from ..retry.outcomes import Outcome
from ..retry.policies import Schedule
from ..sqs.visibility import standing, visibility_delay
from .announcer import Announcer
from .lease import Lease, Turn
from .pacing import Pace, Paced, Pacer, Turns

__all__ = ["Gate", "Owner"]


class Owner(Protocol):
    """What a gate needs of the worker's gates."""

    lock: Any  # a context manager
    rng: random.Random
    clock: Callable[[], float]
    today: Callable[[], float]
    events: Events
    pacer: Pacer

    def look_again(self, gate: Gate) -> None: ...
    def expect(
        self, lease: Lease, gate: Gate, not_before: float, *, own_delay_ends: float
    ) -> None: ...


class Gate:
    """One provider, or one tenant of it. Safe in any thread; no method waits for SQS or a store.

    Arguments:
        provider: its settings.
        owner: the worker's gates.
        tenant: what stands for the tenant in logs; empty = there is none.
        pace: the line for slots at its rate; ``None`` = it has no rate.
    """

    def __init__(
        self, provider: Provider, owner: Owner, *, tenant: str = "", pace: Pace | None = None
    ) -> None:
        self.provider = provider
        self.tenant = tenant
        self.pace = pace
        self._owner = owner
        self.control = Control(
            provider.thresholds,
            owner.rng,
            limit=0 if provider.recall is False else DEFAULT_LIMIT,
            on_event=Announcer(provider.name, tenant, owner.events),
        )
        self.turns = Turns(self._take_turns, self._seconds_to_turn)

    def hides(self, lease: Lease, options: Options) -> bool:
        """Hide a message that has come due without running it, if the provider says so.

        Not on the last receive that the queue allows, because SQS would move the message at the
        next one, and not one that has no time left, see ``retry.budget``: it runs once more.
        """
        delivery, now = lease.delivery, self._owner.clock()
        with self._owner.lock:
            is_its_turn = lease.slot_at is not None or lease.turn is Turn.HAS_COME
            may_start = is_its_turn and self.control.health.state is State.CLOSED
            if may_start or self.control.is_quiet:
                self.control.look_quietly(delivery.message_id, now)
                return False
            today = self._owner.today()
            longest = _longest_hold(lease, options, today)
            look = self.control.look(
                delivery.message_id,
                now,
                policy=tolerant(options.backoff),
                looks=delivery.receive_count,
                longest=max(1.0, longest),
                ahead=len(self.turns),
                longest_wait=self._longest_wait(lease) if longest > 0 else 0.0,
                recallable=self.is_recallable(options),
                is_last=longest <= 0 or delivery.is_last_before_sqs_moves_it,
            )
            lease.turn = Turn.IS_AWAITED if look.waits else Turn.NONE
            if look.is_probe:
                lease.slot_at = math.inf  # it needs none: one call, from time to time
                self._replace_if_not_run(lease)
            if look.hide_seconds is None:
                return False
            if self.is_recallable(options):
                own = tolerant(options.backoff).delay_for(
                    delivery.message_id, delivery.receive_count, self._owner.rng
                )
                self._owner.expect(lease, self, 0.0, own_delay_ends=now + own)
        return lease.give_back(
            until=now + visibility_delay(look.hide_seconds, delivery, now=today), was_due=True
        )

    @property
    def hides_all(self) -> bool:
        """Whether the provider is down, and no probe is due."""
        with self._owner.lock:
            health = self.control.health
            is_closed = health.state is State.CLOSED
            return not is_closed and not health.needs_probe(self._owner.clock())

    def _replace_if_not_run(self, probe: Lease) -> None:
        """Look for another probe if this one is settled, or lost, before its task has begun."""
        free = probe.free

        def freed() -> None:
            free()
            if not probe.handed_to_pool():
                with self._owner.lock:
                    self.control.abandoned(probe.delivery.message_id, self._owner.clock())
                    self._owner.look_again(self)

        probe.free = freed

    def waits(self, lease: Lease, options: Options, start: Callable[[], object]) -> bool:
        """Put a message that may run in line for a slot at the provider's rate.

        Or for its turn, while the provider recovers.

        Returns:
            ``False`` if it needs none, or has one: then it starts now. Else ``start`` is called
            once it has, or the message is hidden until slots are near again.
        """
        if lease.turn is Turn.IS_AWAITED:
            lease.slot_at = None
            self._wait_for_turn(lease, start)
            return True
        was_late = _is_too_late(lease, self._owner.clock())
        if self.pace is None or (lease.slot_at is not None and not was_late):
            return False
        if _is_given_up(lease, options, self._owner.today()):
            return False
        lease.slot_at = None
        with self._owner.lock:
            self.control.abandoned(lease.delivery.message_id, self._owner.clock())

        def give_slot(slot: float) -> None:
            # Where others' tasks block Celery's loop it would be too late for ever: once is enough.
            lease.slot_at = math.inf if was_late else slot
            lease.keeps_place = False
            start()

        def hide(until: float) -> None:
            now, today = self._owner.clock(), self._owner.today()
            # SQS hides for whole seconds. Back a little early, it waits for its slot; late, it
            # would miss it, and nobody else uses that slot if all others are hidden too.
            seconds = min(math.floor(until - now), max(1.0, _longest_hold(lease, options, today)))
            lease.give_back(until=now + visibility_delay(seconds, lease.delivery, now=today))

        has_time = _longest_hold(lease, options, self._owner.today()) > 0
        longest = self._longest_wait(lease) if has_time and not was_late else math.inf
        # In a worker that is behind it waits for a process rather than for a slot.
        lease.keeps_place = self.pace.is_behind
        paced = Paced(
            give_slot,
            hide,
            lease.is_settled,
            lambda: lease.slot_at is not None and not lease.is_settled(),
        )
        self._owner.pacer.join(self.pace, paced, longest)
        return True

    def _wait_for_turn(self, lease: Lease, start: Callable[[], object]) -> None:
        def take_turn(now: float) -> None:
            lease.turn = Turn.HAS_COME
            start()

        paced = Paced(take_turn, hide=lambda until: None, is_over=lease.is_settled)
        self._owner.pacer.wait_for_turn(self.turns, paced)

    def _take_turns(self, waiting: int, now: float) -> int:
        with self._owner.lock:
            return self.control.turns(waiting, now)

    def _seconds_to_turn(self, now: float) -> float:
        with self._owner.lock:
            return self.control.admission.seconds_to_turn(0, now)

    def _longest_wait(self, lease: Lease) -> float:
        return longest_wait(
            is_returned=lease.delivery.receive_count > 1,
            must_stay=lease.delivery.is_last_before_sqs_moves_it,
        )

    def ended(self, lease: Lease, ended: Ended) -> None:
        """Note how a run ended.

        Each failure that a rule attributes to the provider counts, in doubt or not: a gateway that
        answers 502 is to be left alone, too. An error that no rule knows says nothing.
        """
        message_id, now = lease.delivery.message_id, self._owner.clock()
        with self._owner.lock:
            if ended.end is End.RETURNED or ended.reply is Reply.ANSWERED:
                self.control.ended(message_id, None, now)
            elif ended.reply is Reply.FAILED:
                retry_after = ended.word.retry_after if isinstance(ended.word, RetryIn) else None
                self.control.ended(message_id, Outcome.RETRYABLE, now, retry_after=retry_after)
            else:
                self.control.abandoned(message_id, now)
            self._owner.look_again(self)

    def delayed(self, seconds: float, lease: Lease, ended: Ended, options: Options) -> float:
        """Return how long to hide a message that has failed; remember it for a recall."""
        if not isinstance(ended.word, RetryIn):
            return seconds
        message_id, now = lease.delivery.message_id, self._owner.clock()
        longest = _longest_hold(lease, options, self._owner.today())
        is_recallable = self.is_recallable(options)
        with self._owner.lock:
            is_providers = ended.reply is Reply.FAILED and not ended.word.is_named
            keeps = not is_providers or self.control.keeps_its_delay(message_id)
            floor = seconds if keeps else ended.word.retry_after or 0.0
            if is_recallable:
                self._owner.expect(lease, self, now + floor, own_delay_ends=now + seconds)
            return self.control.delay_after_failure(
                message_id,
                seconds,
                now,
                floor=floor if lease.delivery.has_receives_to_spare else seconds,
                policy=tolerant(options.backoff),
                looks=lease.delivery.receive_count,
                longest=max(seconds, longest),
                recallable=is_recallable,
            )

    def is_recallable(self, options: Options) -> bool:
        """Whether a task's hidden messages may be brought forward."""
        if self.provider.recall is None:
            return not isinstance(options.backoff, Schedule)
        return self.provider.recall

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing in mind that would be missed."""
        return self.control.is_quiet and not self.in_line and not self.hidden

    @property
    def hidden(self) -> int:
        """Messages that this worker has hidden, and that are not due yet. Call it under the lock.

        One of them may run in another worker when it is due, which tells this one nothing.
        """
        return self.control.memory.count(self._owner.clock())

    @property
    def in_line(self) -> int:
        """Messages that wait here for a slot at its rate, or for their turn."""
        return len(self.turns) + (0 if self.pace is None else len(self.pace.line))


def _is_too_late(lease: Lease, now: float) -> bool:
    """Whether Celery's loop was so slow that calls would begin closer together than agreed."""
    return lease.slot_at is not None and now - lease.slot_at > LATEST_SECONDS


def _longest_hold(lease: Lease, options: Options, today: float) -> float:
    return longest_hold(_standing(lease, today), retry_for=options.retry_for)


def _is_given_up(lease: Lease, options: Options, today: float) -> bool:
    """Whether a message is given up instead of being run."""
    reason = exhausted_before_run(
        _standing(lease, today),
        max_retries=options.max_retries,
        retry_for=options.retry_for,
        crashes=lease.keeper.memory.crashes(lease.delivery.message_id),
        crash_budget=options.crash_budget,
    )
    return reason is not None


def _standing(lease: Lease, today: float) -> Standing:
    delivery = lease.delivery
    return standing(delivery, retries=delivery.earlier_runs, now=today)

"""One provider in one worker: may a message run, how did its run end, how long is it hidden?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..observe.events import (
    ProviderPaused,
    ProviderProbed,
    ProviderRecovered,
    ProviderRecovering,
    ProviderSlowed,
)
from ..provider.fleet import FleetSlots
from ..provider.gate import (
    MANY_FAILURES,
    Message,
    ProviderGate,
    State,
)
from ..provider.rate import LATEST_SECONDS, longest_wait
from ..provider.settings import Provider
from ..retry.budget import longest_hold, tolerant
from ..retry.decision import End, Ended, Hide, Reply
from ..retry.options import Options
from ..retry.policies import Schedule
from ..sqs.hidden import MOST_HIDDEN
from ..sqs.settlement import Row
from ..sqs.visibility import standing, visibility_delay
from .lease import Lease
from .pacing import Pace, Paced

if TYPE_CHECKING:
    from .gates import Gates

#: Between two log lines on a recovery that goes on.
_TOLD_SECONDS = 60.0


class Gate:
    """One provider, or one tenant of it. Safe in any thread; no method waits for SQS or a store.

    Arguments:
        provider: its settings.
        owner: the worker's gates.
        tenant: what stands for the tenant in logs; empty = there is none.
        fleet: where the slots at its rate are shared; ``None`` = nowhere.
    """

    def __init__(
        self, provider: Provider, owner: Gates, *, tenant: str = "", fleet: FleetSlots | None = None
    ) -> None:
        self.provider = provider
        self.tenant = tenant
        self._owner = owner
        self.pace = Pace(
            provider.name,
            provider.rate,
            fleet,
            turns=self._take_turns,
            seconds_to_turn=self._seconds_to_turn,
        )
        recalls = provider.recall is not False
        self.core = ProviderGate(
            provider.thresholds,
            owner.rng,
            is_limited=recalls,
            most_hidden=MOST_HIDDEN if recalls else 0,
        )
        self._recalled, self._told_at = 0, 0.0

    def hides(self, lease: Lease, options: Options) -> bool:
        """Hide a message that has come due without running it, if the provider says so.

        Not on the last receive that the queue allows, because SQS would move the message at the
        next one, and not one that has no time left, see ``retry.budget``: it runs once more.
        """
        delivery, now = lease.delivery, self._owner.clock()
        with self._owner.lock:
            has_turn = lease.slot_at is not None
            if self.core.state is State.CLOSED or (has_turn and self.core.state is not State.OPEN):
                self.core.started(delivery.message_id, now)
                return False
        today = self._owner.today()
        message = self._message(lease, options, today)
        with self._owner.lock:
            # With an agreed rate it takes its token when it has its slot.
            waiting = max(self.in_line, int(self.pace.has_rate))
            look = self.core.arrived(message, now, waiting=waiting)
            lease.awaits_turn = look.waits
            if look.is_probe:
                self._owner.tell(ProviderProbed(provider=self.provider.name, tenant=self.tenant))
                lease.slot_at = math.inf  # it needs none: one call, from time to time
                self._replace_if_not_run(lease)
        self._owner.tell_now()
        if look.hide_seconds is None:
            return False
        lease.recall = look.recall
        return lease.give_back(
            until=now + visibility_delay(look.hide_seconds, delivery, now=today), was_due=True
        )

    def _message(self, lease: Lease, options: Options, today: float) -> Message:
        """Describe a message. Not under the lock, because it asks the user's policy."""
        delivery, policy = lease.delivery, tolerant(options.backoff)
        return Message(
            delivery.message_id,
            receives=delivery.receive_count,
            longest=_longest_hold(lease, options, today),
            policy_longest=policy.ceiling(MANY_FAILURES),
            own_delay=policy.delay_for(
                delivery.message_id, delivery.receive_count, self._owner.rng
            ),
            is_recallable=self.is_recallable(options),
            is_spared=not delivery.has_receives_to_spare,
            next_is_last=delivery.is_next_the_last,
            must_run=delivery.is_last_before_sqs_moves_it,
        )

    @property
    def hides_all(self) -> bool:
        """Whether the provider is down, and no probe is due."""
        with self._owner.lock:
            now = self._owner.clock()
            return self.core.state is State.OPEN and not self.core.needs_probe(now)

    def _replace_if_not_run(self, probe: Lease) -> None:
        """Look for another probe if this one is settled, or lost, before its task has begun."""
        free = probe.free

        def freed() -> None:
            free()
            if not probe.handed_to_pool():
                with self._owner.lock:
                    self.core.ended(probe.delivery.message_id, None, self._owner.clock())
                    self._owner.look_again(self)

        probe.free = freed

    def waits(self, lease: Lease, options: Options, start: Callable[[], object]) -> bool:
        """Put a message that may run in the provider's line, if it has one.

        There it waits for a slot at the agreed rate, and for its turn while the provider recovers.

        Returns:
            ``False`` if it needs none, or has one: then it starts now. Else ``start`` is called
            once it has, or the message is hidden until slots are near again.
        """
        awaits_turn = lease.awaits_turn
        was_late = _is_too_late(lease, self._owner.clock())
        if not awaits_turn:
            has_slot = lease.slot_at is not None and not was_late
            if not self.pace.has_rate or has_slot:
                return False
            with self._owner.lock:
                self.core.ended(lease.delivery.message_id, None, self._owner.clock())
        lease.slot_at, lease.awaits_turn = None, False

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
        longest = math.inf
        if has_time and not was_late:
            longest = longest_wait(
                is_returned=lease.delivery.receive_count > 1,
                must_stay=lease.delivery.is_last_before_sqs_moves_it,
            )
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

    def _take_turns(self, waiting: int, now: float) -> int:
        with self._owner.lock:
            return self.core.turns(waiting, now)

    def _seconds_to_turn(self, now: float) -> float:
        with self._owner.lock:
            return self.core.rate.seconds_to_turn(now)

    def ended(self, lease: Lease, ended: Ended) -> None:
        """Note how a run ended.

        Each failure that a rule attributes to the provider counts, in doubt or not: a gateway that
        answers 502 is to be left alone, too. An error that no rule knows says nothing.
        """
        reply = Reply.ANSWERED if ended.end is End.RETURNED else ended.reply
        retry_after = ended.decision.retry_after if isinstance(ended.decision, Hide) else None
        with self._owner.lock:
            was, now = self.core.state, self._owner.clock()
            self.core.ended(lease.delivery.message_id, reply, now, retry_after=retry_after)
            self._tell(was)
            self._owner.look_again(self)
        self._owner.tell_now()

    def delayed(self, seconds: float, lease: Lease, ended: Ended, options: Options) -> float:
        """Return how long to hide a message that has failed; remember it for a recall."""
        if not isinstance(ended.decision, Hide):
            return seconds
        now, today = self._owner.clock(), self._owner.today()
        floor = ended.decision.retry_after or 0.0
        if ended.reply is None or ended.decision.is_named:
            floor = seconds
        message = self._message(lease, options, today)
        longest = max(seconds, message.longest)
        message = replace(message, longest=longest, own_delay=seconds)
        with self._owner.lock:
            look = self.core.failed(message, ended.reply, seconds, now, floor=floor)
        lease.recall = look.recall
        return look.hide_seconds or 0.0

    def recalls(self, *, room: int) -> list[Row]:
        """Return the messages to bring forward now. Call it under the lock."""
        was = self.core.state
        taken = self.core.recalls(self._owner.clock(), room=room, waiting=self.in_line)
        self._tell(was)
        self._tell_on()
        if taken and was is State.RECOVERING:
            self._recalled += len(taken)
        return taken

    def _tell(self, was: State) -> None:
        """Tell observers if the state has changed."""
        state, emit = self.core.state, self._owner.tell
        name, tenant = self.provider.name, self.tenant
        if state is was:
            return
        if state is State.OPEN:
            emit(ProviderPaused(provider=name, tenant=tenant))
        elif state is State.CLOSED:
            emit(ProviderRecovered(provider=name, tenant=tenant, recalled=self._recalled))
        else:
            self._recalled, self._told_at = 0, self._owner.clock()
            if was is State.CLOSED:
                emit(ProviderSlowed(provider=name, tenant=tenant))
            else:
                self._tell_of_recovery()

    def _tell_on(self) -> None:
        """Tell observers each minute how the recovery goes on."""
        is_time = self._owner.clock() >= self._told_at + _TOLD_SECONDS
        if is_time and self.core.state is State.RECOVERING:
            self._tell_of_recovery()

    def _tell_of_recovery(self) -> None:
        self._told_at = self._owner.clock()
        self._owner.tell(
            ProviderRecovering(
                provider=self.provider.name,
                tenant=self.tenant,
                rate=self.rate,
                waiting=self.hidden + self.in_line,
            )
        )

    def is_recallable(self, options: Options) -> bool:
        """Whether a task's hidden messages may be brought forward."""
        if self.provider.recall is None:
            return not isinstance(options.backoff, Schedule)
        return self.provider.recall

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing in mind that would be missed."""
        return self.core.state is State.CLOSED and not self.in_line and not self.hidden

    @property
    def hidden(self) -> int:
        """Messages that this worker has hidden, and that are not due yet."""
        return len(self.core.hidden)

    @property
    def rate(self) -> float:
        """Calls a second that this worker may make while the provider recovers; else 0."""
        return self.core.rate.rate if self.core.state is State.RECOVERING else 0.0

    @property
    def in_line(self) -> int:
        """Messages that wait here for a slot at its rate, or for their turn."""
        return len(self.pace.line)


def _is_too_late(lease: Lease, now: float) -> bool:
    """Whether Celery's loop was so slow that calls would begin closer together than agreed."""
    return lease.slot_at is not None and now - lease.slot_at > LATEST_SECONDS


def _longest_hold(lease: Lease, options: Options, today: float) -> float:
    delivery = lease.delivery
    held = standing(delivery, retries=delivery.earlier_runs, now=today)
    return longest_hold(held, retry_for=options.retry_for)

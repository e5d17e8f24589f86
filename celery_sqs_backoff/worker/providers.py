"""Decides whether a message may run now, from the state of its task's provider.

:class:`~celery_sqs_backoff.provider.gate.ProviderGate` decides without knowing the worker. A
:class:`Gate` gives it the facts of one provider, or of one tenant: due messages, ends of runs, and
messages that SQS hides. :class:`Gates` has all gates of a worker, and brings messages forward.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from celery.exceptions import ImproperlyConfigured
from celery.utils.log import get_logger

from ..observe.board import ProviderNow
from ..observe.events import (
    ProviderPaused,
    ProviderProbed,
    ProviderRecovered,
    ProviderRecovering,
    ProviderSlowed,
    Recalled,
    WorkerEvent,
)
from ..provider.fleet import FleetSlots
from ..provider.gate import MANY_FAILURES, Message, ProviderGate, State
from ..provider.rate import HEADROOM, LATEST_SECONDS, longest_wait
from ..provider.settings import Provider
from ..provider.tenant import digest_of, tenant_of
from ..retry.budget import longest_hold, tolerant
from ..retry.decision import End, Hide, Reply, RunEnd
from ..retry.options import Options
from ..sqs.queues import queue_name
from ..sqs.visibility import standing, visibility_delay
from ..store.settings import is_store_shared, records_of
from ..text import printable
from .keeper import Keeper
from .lease import Lease
from .pacing import Pace, Paced, Pacer

logger = get_logger(__name__)

#: The longest that a stopping worker makes calls, in seconds.
HAND_OVER_SECONDS: Final = 5.0

#: Between two log lines on a recovery that goes on.
_TOLD_SECONDS: Final = 60.0

#: Names of a gate's states for those who watch it.
_STATES: Final = {State.CLOSED: "ok", State.OPEN: "paused", State.RECOVERING: "recovering"}

#: Tenants of one provider with gates of their own. Further tenants share one gate.
MOST_TENANTS: Final = 1_000


class Gate:
    """One provider, or one tenant of it. Safe in any thread. No method waits for SQS or a store.

    Arguments:
        provider: its settings.
        owner: the worker's gates.
        tenant: the name of the tenant in logs, empty without a tenant.
        fleet: where the slots at its rate are shared, or ``None``.
    """

    def __init__(
        self, provider: Provider, owner: Gates, *, tenant: str = "", fleet: FleetSlots | None = None
    ) -> None:
        self.provider = provider
        self.tenant = tenant
        self._owner = owner
        self.core = ProviderGate(
            owner.rng, failures=provider.failures, probe_interval=provider.probe_interval
        )
        self.pace = Pace(provider.name, provider.rate, fleet, self.core)
        self._recalled, self._told_at = 0, 0.0

    def hides(self, lease: Lease, options: Options) -> bool:
        """Hide a message that has come due without running it, if the provider says so.

        Also true if it was lost meanwhile.

        It runs a message at the last receive that the queue allows, because SQS would move it at
        the next one. It also runs a message without time left, see ``retry.budget``.
        """
        delivery, now = lease.delivery, self._owner.clock()
        with self._owner.lock:
            if self.core.probe == delivery.message_id:
                lease.slot_at = math.inf  # a probe needs no slot
            has_turn = lease.slot_at is not None or self.core.state is State.CLOSED
            if has_turn and self.core.begins(delivery.message_id, now):
                return False
        message = self._message(lease, options)
        with self._owner.lock:
            # With an agreed rate it takes its token when it has its slot.
            waiting = max(self.in_line, int(self.pace.has_rate))
            look = self.core.arrived(message, now, waiting=waiting)
            lease.awaits_turn = look.waits
            if look.is_probe:
                self._owner.tell(ProviderProbed(provider=self.provider.name, tenant=self.tenant))
                lease.slot_at = math.inf
                self._replace_if_not_run(lease)
        self._owner.tell_now()
        if look.hide_seconds is not None:
            lease.recall = look.recall
            seconds = visibility_delay(look.hide_seconds, delivery, now=time.time())
            lease.give_back(until=now + seconds, was_due=True)
        if not lease.is_settled():
            return False
        self.not_begun(lease)  # it may be a probe that was lost while the gate decided
        return True

    def lets_begin(self, lease: Lease, options: Options) -> bool:
        """Ask again about a message that was let pass, now that there is a process for it.

        Without this each message that waits for one would run while the provider is down.
        """
        with self._owner.lock:
            if self.core.begins(lease.delivery.message_id, self._owner.clock()):
                return True
        return not self.hides(lease, options)

    def _message(self, lease: Lease, options: Options) -> Message:
        """Describe a message. Not under the lock, because it asks the user's policy."""
        delivery, policy = lease.delivery, tolerant(options.backoff)
        return Message(
            delivery.message_id,
            receives=delivery.receive_count,
            longest=_longest_hold(lease, options),
            policy_longest=policy.ceiling(MANY_FAILURES),
            own_delay=policy.delay_for(
                delivery.message_id, delivery.receive_count, self._owner.rng
            ),
            is_recallable=self.provider.recalls(options.backoff),
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
                self.not_begun(probe)

        probe.free = freed

    def not_begun(self, lease: Lease) -> None:
        """Note that a message does not run. If it was the probe, look for another one."""
        with self._owner.lock:
            if self.core.probe == lease.delivery.message_id:
                self.core.ended(lease.delivery.message_id, None, self._owner.clock())
                self._owner.look_again(self)

    def waits(self, lease: Lease, options: Options, start: Callable[[], object]) -> bool:
        """Put a message that may run in the provider's line, if it has one.

        There it waits for a slot at the agreed rate, and for its turn while the provider recovers.

        Returns:
            ``False`` if it needs no slot, or has one, so that it starts now. Otherwise ``start``
            is called at its slot, or the message is hidden until slots are near again.
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
            # SQS hides for whole seconds. A message that is back early waits for its slot. A late
            # one would miss it, and the slot is lost if all other messages are hidden too.
            now = self._owner.clock()
            seconds = min(math.floor(until - now), max(1.0, _longest_hold(lease, options)))
            delay = visibility_delay(seconds, lease.delivery, now=time.time())
            lease.give_back(until=now + delay)

        has_time = _longest_hold(lease, options) > 0
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

    def ended(self, lease: Lease, ended: RunEnd) -> None:
        """Note how a run ended.

        Each failure that a rule attributes to the provider counts, in doubt or not, because a
        gateway that answers 502 needs a pause too. An error that no rule knows does not count.
        """
        reply = Reply.ANSWERED if ended.end is End.RETURNED else ended.reply
        retry_after = ended.decision.retry_after if isinstance(ended.decision, Hide) else None
        with self._owner.lock:
            was, now = self.core.state, self._owner.clock()
            self.core.ended(lease.delivery.message_id, reply, now, retry_after=retry_after)
            self._tell(was)
            self._owner.look_again(self)
        self._owner.tell_now()

    def delayed(self, seconds: float, lease: Lease, ended: RunEnd, options: Options) -> float:
        """Return how long to hide a message that has failed, and remember it for a recall."""
        if not isinstance(ended.decision, Hide):
            return seconds
        floor = ended.decision.retry_after or 0.0
        if ended.reply is None or ended.decision.is_named:
            floor = seconds
        message = self._message(lease, options)
        message = replace(message, longest=max(seconds, message.longest), own_delay=seconds)
        with self._owner.lock:
            now = self._owner.clock()
            look = self.core.failed(message, ended.reply, seconds, now, floor=floor)
        lease.recall = look.recall
        return look.hide_seconds or 0.0

    def recalls(self, *, room: int) -> list[Lease]:
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

    @property
    def is_idle(self) -> bool:
        """Whether it has no state to lose."""
        return self.core.state is State.CLOSED and not self.in_line and not self.hidden

    @property
    def hidden(self) -> int:
        """Messages that this worker has hidden, and that are not due yet."""
        return len(self.core.hidden)

    @property
    def rate(self) -> float:
        """The calls a second that this worker may make while the provider recovers, else 0."""
        return self.core.rate.rate if self.core.state is State.RECOVERING else 0.0

    @property
    def in_line(self) -> int:
        """Messages that wait here for a slot at its rate, or for their turn."""
        return len(self.pace.line)


class Gates:
    """The gates of a worker, by provider and tenant.

    Arguments:
        keeper: the gates share its clock and its events.
        room: most messages that the worker has processes for now.
        fleet: returns where the slots of a provider's tenant are shared, from its name and rate.
            ``None`` if each worker has the rate for itself.
        rng: draws intervals and delays.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        room: Callable[[], int],
        fleet: Callable[[tuple[str, ...], float], FleetSlots | None] = lambda name, rate: None,
        rng: random.Random | None = None,
    ) -> None:
        self._keeper = keeper
        self.lock = keeper.lock
        self.rng = rng or random.Random()
        self.clock = keeper.clock
        self.events = keeper.events
        self.pacer = Pacer(keeper.clock, keeper.lock, self.recall)
        self._room = room
        self._fleet = fleet
        self._gates: OrderedDict[tuple[str, str], Gate] = OrderedDict()
        self._differing: set[Provider] = set()
        self._told: deque[WorkerEvent] = deque()

    def of(self, provider: Any, tenant: str = "") -> Gate | None:
        """Return the gate of a task's option ``provider``, or ``None`` without that option."""
        if provider is None:
            return None
        name = provider if isinstance(provider, str) else provider.name
        with self.lock:
            gate = self._gates.get((name, tenant))
            if gate is None:
                wanted = Provider(provider) if isinstance(provider, str) else provider
                return self._make(wanted, tenant)
            if gate.provider is not provider and not isinstance(provider, str):
                self._compare(gate.provider, provider)
            if tenant:
                self._gates.move_to_end((name, tenant))
            return gate

    def _compare(self, first: Provider, other: Provider) -> None:
        if other != first and other not in self._differing:
            self._differing.add(other)
            logger.warning(
                "sqs_backoff.provider_differs: %s is described twice; the first one counts",
                printable(first.name),
            )

    def of_call(self, task: Any, payload: Callable[[], Any]) -> Gate | None:
        """Return the gate of one call of a task. Reads its arguments only if they matter."""
        provider = task.backoff_options.provider
        key = getattr(provider, "key", None)
        if key is None:
            return self.of(provider)
        return self.of(provider, _tenant(key, task, payload()))

    def _make(self, provider: Provider, tenant: str) -> Gate:
        if tenant and not self._make_room(provider.name):
            return self.of(provider) or self._make(provider, "")
        name = (provider.name, tenant) if tenant else (provider.name,)
        fleet = None if provider.rate is None else self._fleet(name, provider.rate)
        gate = Gate(provider, self, tenant=digest_of(tenant) if tenant else "", fleet=fleet)
        self._gates[provider.name, tenant] = gate
        return gate

    def _make_room(self, name: str) -> bool:
        """Forget the tenant that was not seen for longest, and is not missed."""
        tenants = [key for key in self._gates if key[0] == name and key[1]]
        if len(tenants) < MOST_TENANTS:
            return True
        idle = next((key for key in tenants if self._gates[key].is_idle), None)
        if idle is None:
            return False
        del self._gates[idle]
        return True

    def now(self) -> list[ProviderNow]:
        """Return the state of each provider and tenant, for ``sqs-status`` and metrics."""
        with self.lock:
            return [
                ProviderNow(
                    provider=name,
                    tenant=gate.tenant,
                    state=_STATES[gate.core.state],
                    hidden=gate.hidden,
                    in_line=gate.in_line,
                    rate=gate.rate,
                )
                for (name, _), gate in self._gates.items()
            ]

    def tell(self, event: WorkerEvent) -> None:
        """Tell observers of an event once the lock is free, because their log may be slow."""
        self._told.append(event)

    def tell_now(self) -> None:
        """Tell observers of the waiting events. Call it without the lock."""
        with suppress(IndexError):  # another thread has told the last one
            while self._told:
                self.events.emit(self._told.popleft())

    def look_again(self, gate: Gate) -> None:
        """Look for messages to bring forward, while the provider is not well."""
        if gate.core.state is not State.CLOSED:
            self.pacer.look_soon()

    def fault(self) -> str | None:
        """Return which thread has died, for the heartbeat, or ``None``."""
        return self.pacer.fault()

    def stop(self) -> None:
        """Stop starting messages and bringing them forward."""
        self.pacer.stop()

    # Messages are brought forward

    def recall(self) -> float | None:
        """Let the table bring due messages forward.

        Returns:
            Seconds until the next look, or ``None`` while all providers are well.
        """
        by_queue: dict[str, list[Lease]] = defaultdict(list)
        most = self._room()
        with self.lock:
            for gate in self._gates.values():
                is_probing = gate.core.state is State.OPEN
                room = self._keeper.room_to_bring_forward(1 if is_probing else most)
                for row in gate.recalls(room=room):
                    by_queue[row.queue.url].append(row)
            for url, rows in by_queue.items():
                ids = tuple(row.message_id for row in rows)
                self.tell(Recalled(queue=queue_name(url), message_ids=ids))
                self._keeper.bring_forward((row, self.clock()) for row in rows)
            pauses = [gate.core.seconds_to_look for gate in self._gates.values()]
        self.tell_now()
        return min((pause for pause in pauses if pause is not None), default=None)

    def hand_over(self) -> None:
        """Let this worker's hidden messages come back soon, to others, because it stops.

        Blocks for a few seconds at most. Messages that no call has reached come back when their
        holds end.
        """
        with self.lock:
            now = self.clock()
            rows = [each for gate in self._gates.values() for each in gate.core.hand_over(now)]
            self._keeper.bring_forward((row, now + seconds) for row, seconds in rows)
        if not rows:
            return
        left = self._keeper.flush(HAND_OVER_SECONDS)
        logger.info(
            "sqs_backoff.provider_handed_over: %d of %d hidden messages come back within %d s,"
            " because this worker stops",
            len(rows) - left,
            len(rows),
            max(seconds for _, seconds in rows),
        )


def fleet_of(app: Any, *, worker: str) -> Callable[[tuple[str, ...], float], FleetSlots | None]:
    """Return a function from a provider's name and rate to the place where its slots are shared."""

    def make(name: tuple[str, ...], rate: float) -> FleetSlots | None:
        if not is_store_shared(app):
            return None
        try:
            records = records_of(app)
        except ImproperlyConfigured:  # said at start
            return None
        return FleetSlots(records, name, rate=rate * HEADROOM, worker=worker)

    return make


def introduce(app: Any, tasks: Iterable[Any]) -> None:
    """Say which rates the workers do not share."""
    if is_store_shared(app):
        return
    named = (getattr(getattr(task, "backoff_options", None), "provider", None) for task in tasks)
    limited = {each for each in named if isinstance(each, Provider) and each.rate is not None}
    for provider in sorted(limited, key=lambda each: each.name):
        logger.warning(
            "sqs_backoff.rate_per_worker: %s: each worker makes up to %g calls a second,"
            " because the app names no store for a rate that all share",
            printable(provider.name),
            provider.rate,
        )


def _tenant(key: str, task: Any, payload: Any) -> str:
    """Return the tenant of a call, empty if an argument is missing."""
    is_call = isinstance(payload, list | tuple) and len(payload) > 1
    args, kwargs = payload[:2] if is_call else ((), {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        return ""
    return tenant_of(key, task.run, args, kwargs)


def _is_too_late(lease: Lease, now: float) -> bool:
    """Return whether Celery's loop is so late that calls would begin closer than agreed."""
    return lease.slot_at is not None and now - lease.slot_at > LATEST_SECONDS


def _longest_hold(lease: Lease, options: Options) -> float:
    delivery = lease.delivery
    held = standing(delivery, retries=delivery.earlier_runs, now=time.time())
    return longest_hold(held, retry_for=options.retry_for)

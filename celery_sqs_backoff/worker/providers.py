"""Decides whether a message may run now, from the state of its task's provider.

A provider is an outside service that tasks call. Each provider has a gate, which is a circuit
breaker. A provider with tenants has a gate for each tenant. While the provider is down, the gate is
open: the worker hides the messages, and runs one at a time as a probe. After a successful probe,
the provider counts as recovering, and each message waits for its turn. If a rate is agreed for the
provider, each message also needs a slot, which is a time at which one call may begin.

:class:`~celery_sqs_backoff.provider.gate.ProviderGate` makes the decisions and knows nothing about
the worker. A :class:`Gate` tells its ``ProviderGate`` about due messages, ended runs and hidden
messages, and carries out the decisions. :class:`Gates` has all gates of a worker, and brings
messages forward. That means that it asks SQS to show a hidden message before its hold ends. A hold
is the time for which SQS hides a message.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
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
)
from ..provider.fleet import FleetSlots
from ..provider.gate import GateState, ProviderGate
from ..provider.holds import Look, Message
from ..provider.rate import HEADROOM, NEW_SECONDS, RETURNED_SECONDS
from ..provider.settings import Provider
from ..provider.tenant import digest_of, tenant_of
from ..retry.budget import longest_hold
from ..retry.decision import End, Hide, Reply, RunEnd
from ..retry.options import Options
from ..sqs.queues import queue_name
from ..store.settings import is_store_shared, records_of
from ..text import printable
from .keeper import Keeper
from .lease import Lease
from .pacing import Pace, Pacer

logger = get_logger(__name__)

#: A stopping worker spends at most this time on bringing its hidden messages forward.
HAND_OVER_SECONDS: Final = 5.0

#: Pause between two events about the same recovery. Each event is a log line.
_TOLD_SECONDS: Final = 60.0

#: Names of a gate's states in ``sqs-status`` and metrics.
_STATES: Final = {
    GateState.CLOSED: "ok",
    GateState.OPEN: "paused",
    GateState.RECOVERING: "recovering",
}

#: At most this many tenants of a provider have gates of their own. Further tenants share one gate.
MOST_TENANTS: Final = 1_000


class Gate:
    """The gate of one provider, or of one tenant of it.

    Its :class:`.ProviderGate` (``core``) makes the decisions. Safe in any thread. No method waits
    for SQS or a store.

    Arguments:
        provider: the provider's settings.
        owner: the worker's gates.
        tenant: a hash of the tenant, for logs. Empty without a tenant.
        fleet: gives the slots at a rate that all workers share. ``None``: no rate, or each worker
            has the rate for itself.
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
        self.pace = Pace(provider.name, provider.rate, fleet, self.core, self.hide_until, owner.rng)
        self._probe: Lease | None = None
        self._recalled, self._told_at = 0, 0.0

    def keeps_back(
        self, lease: Lease, options: Options, start: Callable[[], object] | None = None
    ) -> bool:
        """Keep a message back if it must not start now. Return whether it must not start.

        While the provider is down, hide the message, unless it is the probe. While the provider
        recovers, the message waits in this worker for its turn, or is hidden if its turn is far
        away. If the provider has an agreed rate, the message waits for a slot. A message that is
        settled or lost must not start.

        Two kinds of messages are never hidden:

        - a message at the last receive that its queue allows, because SQS would move it to the
          dead-letter queue at the next receive;
        - a message that must run soon, because its ``retry_for`` or its retention period is nearly
          over (``retry.budget.longest_hold``).

        Arguments:
            start: called when the message's turn comes. ``None``: the task begins now, so the
                message cannot wait in this worker.
        """
        now = self._owner.clock()
        with self._owner.lock:
            if self.core.probe == lease.message_id:
                lease.has_turn, self._probe = True, lease  # a probe needs no slot
            is_well, needs_slot = self.core.state is GateState.CLOSED, self.pace.has_rate
            can_begin = lease.has_turn or (is_well and not needs_slot) or start is None
            if can_begin and self.core.begins(lease.message_id, now):
                return False
        look = Look(waits=True) if is_well else self._look_at(lease, options, now)
        if lease.is_settled():
            return True
        if start is None or lease.has_turn or not (look.waits or needs_slot):
            return False
        longest, hold = math.inf, _longest_hold(lease, options)
        if not lease.delivery.is_last_before_sqs_moves_it and hold > 0:
            longest = RETURNED_SECONDS if lease.delivery.receive_count > 1 else NEW_SECONDS
        with self._owner.lock:
            if not look.waits:
                # The gate has noted that a run began. Undo this, because the message must first
                # wait for its slot.
                self.core.ended(lease.message_id, None, now)
            # Messages that wait for slots form a line. The line is stuck if the messages that have
            # slots already wait for processes, because then no further slots are taken. So this
            # message waits for a process, too, and keeps its place in the prefetch window.
            lease.keeps_place = self.pace.is_stuck(now)
        self._owner.pacer.join(self.pace, lease, start, longest, hold)
        return True

    def _look_at(self, lease: Lease, options: Options, now: float) -> Look:
        """Ask the ``ProviderGate`` about a message that is due. Hide it if the gate says so."""
        message = self._message(lease, options)
        with self._owner.lock:
            needs_slot = self.pace.has_rate
            look = self.core.arrived(message, now, waiting=self.in_line, needs_slot=needs_slot)
            if look.is_probe:
                self._owner.tell(ProviderProbed(provider=self.provider.name, tenant=self.tenant))
                lease.has_turn, self._probe = True, lease
        self._owner.tell_now()
        if look.hide_seconds is not None:
            lease.recall = look.recall
            seconds = lease.delivery.visibility_delay(look.hide_seconds, now=time.time())
            lease.give_back(until=now + seconds, was_due=True)
        return look

    def hide_until(self, lease: Lease, until: float) -> None:
        """Hide a message until the given time, because its wait for a slot would be too long.

        SQS hides for whole seconds, so round down. A message that returns early waits for the next
        slot. If the message returned late, a slot could pass unused, because perhaps all other
        messages are hidden.
        """
        assert lease.options is not None
        now = self._owner.clock()
        seconds = min(math.floor(until - now), max(1.0, _longest_hold(lease, lease.options)))
        lease.give_back(until=now + lease.delivery.visibility_delay(seconds, now=time.time()))

    def _message(self, lease: Lease, options: Options) -> Message:
        """Describe a message for the ``ProviderGate``.

        Call this without the lock, because it calls the user's backoff policy, which may be slow.
        """
        return Message.of(
            lease.delivery,
            self.provider,
            options.backoff,
            retry_for=options.retry_for,
            rng=self._owner.rng,
            now=time.time(),
        )

    @property
    def hides_all(self) -> bool:
        """Whether the provider is down, and no probe is due."""
        with self._owner.lock:
            now = self._owner.clock()
            return self.core.state is GateState.OPEN and not self.core.needs_probe(now)

    def ended(self, lease: Lease, ended: RunEnd) -> None:
        """Note how a run ended.

        A failure counts towards an outage if a rule of the task attributes it to the provider. It
        counts even if the provider may have done the work. For example, a gateway that answers 502
        needs a pause too. Unknown errors do not count.
        """
        reply = Reply.ANSWERED if ended.end is End.RETURNED else ended.reply
        retry_after = ended.decision.retry_after if isinstance(ended.decision, Hide) else None
        with self._owner.lock:
            was, now = self.core.state, self._owner.clock()
            self.core.ended(lease.message_id, reply, now, retry_after=retry_after)
            self._tell(was)
            self._owner.look_again(self)
        self._owner.tell_now()

    def delayed(self, seconds: float, lease: Lease, ended: RunEnd, options: Options) -> float:
        """Return for how many seconds to hide a failed message.

        Also note in the message's lease whether the worker may bring the message forward.

        Arguments:
            seconds: the delay that the task's policy gives.
        """
        if not isinstance(ended.decision, Hide):
            return seconds
        floor = ended.decision.retry_after or 0.0
        if ended.reply is None or ended.decision.is_named:
            floor = seconds
        message = self._message(lease, options)
        with self._owner.lock:
            now = self._owner.clock()
            look = self.core.failed(message, ended.reply, seconds, now, floor=floor)
        lease.recall = look.recall
        return look.hide_seconds or 0.0

    def recalls(self, *, room: int) -> list[Lease]:
        """Return the messages to bring forward now, at most ``room``. Call this with the lock.

        If the probe was settled or lost before its task began, plan the next probe.
        """
        was, now, probe = self.core.state, self._owner.clock(), self._probe
        if probe is not None and probe.is_settled() and not probe.handed_to_pool():
            self._probe = None
            if self.core.probe == probe.message_id:
                self.core.ended(probe.message_id, None, now)
        taken = self.core.recalls(now, room=room, waiting=self.in_line)
        self._tell(was)
        if was is GateState.RECOVERING:
            self._recalled += len(taken)
        return taken

    def _tell(self, was: GateState) -> None:
        """Queue an event if the state is no longer ``was``, and one a minute in a recovery."""
        state, now, is_new = self.core.state, self._owner.clock(), self.core.state is not was
        about = {"provider": self.provider.name, "tenant": self.tenant}
        if state is GateState.RECOVERING and (is_new or now >= self._told_at + _TOLD_SECONDS):
            self._told_at, waiting = now, self.hidden + self.in_line
            if was is GateState.CLOSED:
                self._owner.tell(ProviderSlowed(**about))
            else:
                self._owner.tell(ProviderRecovering(**about, rate=self.rate, waiting=waiting))
        elif is_new:
            recalled, self._recalled = self._recalled, 0
            is_open = state is GateState.OPEN
            recovered = ProviderRecovered(**about, recalled=recalled)
            self._owner.tell(ProviderPaused(**about) if is_open else recovered)

    @property
    def hidden(self) -> int:
        """The number of messages that this worker has hidden and can bring forward."""
        return len(self.core.hidden)

    @property
    def rate(self) -> float:
        """The number of calls a second that this worker may make in a recovery, otherwise 0."""
        return self.core.rate.rate if self.core.state is GateState.RECOVERING else 0.0

    @property
    def in_line(self) -> int:
        """The number of messages that wait in this worker for a slot or for their turn."""
        return len(self.pace)


class Gates:
    """The gates of a worker, by provider and tenant.

    Arguments:
        keeper: brings messages forward. The gates share its lock, clock and events.
        room: returns how many messages the worker may bring forward for its free processes.
        app: the Celery app, which may name a store. In this store, workers share a rate. Without a
            store, each worker has the rate for itself.
        worker: this worker's name in the store.
        rng: draws random intervals and delays.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        room: Callable[[], int],
        app: Any = None,
        worker: str = "",
        rng: random.Random | None = None,
    ) -> None:
        self._keeper = keeper
        self.lock = keeper.lock
        self.rng = rng or random.Random()
        self.clock = keeper.clock
        self.tell, self.tell_now = keeper.tell, keeper.tell_now
        self.pacer = Pacer(keeper.clock, keeper.lock, self.recall)
        self._room = room
        self._app, self._worker = app, worker
        self._gates: OrderedDict[tuple[str, str], Gate] = OrderedDict()

    def of(self, provider: Any, tenant: str = "") -> Gate | None:
        """Return the gate for a task's option ``provider``, or ``None`` if the option is not set.

        Make the gate if this is the first call for this provider and tenant.
        """
        if provider is None:
            return None
        name = provider if isinstance(provider, str) else provider.name
        with self.lock:
            gate = self._gates.get((name, tenant))
            if gate is None:
                wanted = Provider(provider) if isinstance(provider, str) else provider
                return self._make(wanted, tenant)
            if tenant:
                self._gates.move_to_end((name, tenant))
            return gate

    def of_call(self, task: Any, payload: Callable[[], Any]) -> Gate | None:
        """Return the gate for one call of a task.

        Read the call's arguments only if the provider has a ``key``, which names the argument that
        holds the tenant.
        """
        provider = task.backoff_options.provider
        key = getattr(provider, "key", None)
        if key is None:
            return self.of(provider)
        return self.of(provider, tenant_of(key, task.run, payload()))

    def _make(self, provider: Provider, tenant: str) -> Gate:
        if tenant and not self._make_room(provider.name):
            return self.of(provider) or self._make(provider, "")
        name = (provider.name, tenant) if tenant else (provider.name,)
        fleet = self._fleet_of(name, provider.rate)
        gate = Gate(provider, self, tenant=digest_of(tenant) if tenant else "", fleet=fleet)
        self._gates[provider.name, tenant] = gate
        return gate

    def _fleet_of(self, name: tuple[str, ...], rate: float | None) -> FleetSlots | None:
        if rate is None or self._app is None or not is_store_shared(self._app):
            return None
        try:
            records = records_of(self._app)
        except ImproperlyConfigured:  # the worker has logged it at its start
            return None
        return FleetSlots(
            records, name, rate=rate * HEADROOM, worker=self._worker, clock=self.clock
        )

    def _make_room(self, name: str) -> bool:
        """Forget an idle tenant if there is no room for another. Return whether there is room now.

        A tenant is idle if its gate is closed and no message waits or is hidden. Of the idle
        tenants, forget the least recently used.
        """
        tenants = [key for key in self._gates if key[0] == name and key[1]]
        if len(tenants) < MOST_TENANTS:
            return True
        for key in tenants:
            gate = self._gates[key]
            if gate.core.state is GateState.CLOSED and not gate.in_line and not gate.hidden:
                del self._gates[key]
                return True
        return False

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

    def look_again(self, gate: Gate) -> None:
        """Let the pacer search now for hidden messages to bring forward.

        If the gate is closed, do nothing.
        """
        if gate.core.state is not GateState.CLOSED:
            self.pacer.look_soon()

    # Messages are brought forward

    def recall(self) -> float | None:
        """Bring forward the hidden messages that the gates choose now.

        Returns:
            Seconds until the next search, or ``None`` if all gates are closed.
        """
        by_queue: dict[str, list[Lease]] = defaultdict(list)
        most = self._room()
        with self.lock:
            left = self._keeper.room_to_bring_forward(most)
            for gate in self._gates.values():
                # A probe does not use up ``left``. Probes are few, and need not wait while another
                # provider recovers.
                is_probing = gate.core.state is GateState.OPEN
                rows = gate.recalls(room=min(most, 1) if is_probing else left)
                left -= 0 if is_probing else len(rows)
                for row in rows:
                    by_queue[row.queue.url].append(row)
            for url, rows in by_queue.items():
                ids = tuple(row.message_id for row in rows)
                self.tell(Recalled(queue=queue_name(url), message_ids=ids))
                self._keeper.bring_forward((row, self.clock()) for row in rows)
            pauses = [gate.core.seconds_to_look for gate in self._gates.values()]
        self.tell_now()
        return min((pause for pause in pauses if pause is not None), default=None)

    def hand_over(self) -> None:
        """Ask SQS to show hidden messages to other workers soon, because this worker stops.

        Block for at most ``HAND_OVER_SECONDS``. If SQS has not confirmed this for a message by
        then, the message comes back when its hold ends.
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


def introduce(app: Any, tasks: Iterable[Any]) -> None:
    """Log a warning for each provider that tasks describe with different settings.

    If the app names no store, also log a warning for each provider with a rate. Without a store,
    each worker has the rate for itself.
    """
    named = (getattr(getattr(task, "backoff_options", None), "provider", None) for task in tasks)
    providers = {Provider(each) if isinstance(each, str) else each for each in named if each}
    for name, number in sorted(Counter(each.name for each in providers).items()):
        if number > 1:
            logger.warning(
                "sqs_backoff.provider_differs: %s: tasks describe it with different settings;"
                " the worker uses the settings of the task that it receives first",
                printable(name),
            )
    if is_store_shared(app):
        return
    for provider in sorted(providers, key=lambda each: each.name):
        if provider.rate is not None:
            logger.warning(
                "sqs_backoff.rate_per_worker: %s: each worker makes up to %g calls a second,"
                " because the app names no store in which workers can share the rate",
                printable(provider.name),
                provider.rate,
            )


def _longest_hold(lease: Lease, options: Options) -> float:
    delivery = lease.delivery
    held = delivery.standing(retries=delivery.earlier_runs, now=time.time())
    return longest_hold(held, retry_for=options.retry_for)

"""The providers of a worker's tasks: who may run, what is brought forward, who waits for a slot.

The decisions are those of :class:`~celery_sqs_backoff.provider.gate.ProviderGate`, one per provider
and tenant. This room gives it the worker's facts: messages that come due, how runs end, what SQS
has hidden. A thread brings messages forward; it sleeps while every provider is well.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from celery.utils.log import get_logger

from ..observe.board import ProviderNow
from ..observe.events import Event, Recalled
from ..provider.fleet import FleetSlots
from ..provider.gate import State
from ..provider.settings import Provider
from ..provider.tenant import digest_of, tenant_of
from ..sqs.queues import queue_name
from ..sqs.settlement import Row
from ..text import BUG_CALLS, error_site, printable
from ..threads import start_daemon
from .gate import Gate
from .keeper import Keeper
from .pacing import Pacer

logger = get_logger(__name__)

#: A stopping worker makes calls for so long at the most.
HAND_OVER_SECONDS: Final = 5.0

#: Names of a gate's states for those who watch it.
_STATES: Final = {State.CLOSED: "ok", State.OPEN: "paused", State.RECOVERING: "recovering"}

#: Tenants of one provider; those beyond share one gate.
MOST_TENANTS: Final = 1_000


class Gates:
    """The gates of a worker, by provider and tenant.

    Arguments:
        keeper: whose clock and events they share.
        room: most messages that the worker has processes for now.
        fleet: from the name of a provider and its tenant, and its rate, to where its slots are
            shared; ``None``: each worker has the rate for itself.
        rng: draws intervals and delays.
        today: seconds since the epoch, as SQS's timestamps.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        room: Callable[[], int],
        fleet: Callable[[tuple[str, ...], float], FleetSlots | None] = lambda name, rate: None,
        rng: random.Random | None = None,
        today: Callable[[], float] = time.time,
    ) -> None:
        self._keeper = keeper
        self.lock = keeper.lock
        self.rng = rng or random.Random()
        self.clock = keeper.clock
        self.today = today
        self.events = keeper.events
        self.pacer = Pacer(keeper.clock)
        self._room = room
        self._fleet = fleet
        self._gates: OrderedDict[tuple[str, str], Gate] = OrderedDict()
        self._differing: set[Provider] = set()
        self._changed = threading.Condition(self.lock)
        self._is_stopping = False
        self._told: deque[Event] = deque()
        self._thread: threading.Thread | None = None

    def of(self, provider: Any, tenant: str = "") -> Gate | None:
        """Return the gate of a task's option ``provider``; ``None``: the task has none."""
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
        """Return the gate of one call of a task; its arguments are read only if they matter."""
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

    def tell(self, event: Event) -> None:
        """Let observers hear of something once the lock is free: they may write to a slow log."""
        self._told.append(event)

    def tell_now(self) -> None:
        """Tell observers what they have not heard. Call it without the lock."""
        with suppress(IndexError):  # another thread has told the last one
            while self._told:
                self.events.emit(self._told.popleft())

    def look_again(self, gate: Gate) -> None:
        """Wake the thread if there is something to watch; start it if there never was."""
        if gate.core.state is State.CLOSED or self._is_stopping:
            return
        if self._thread is None:
            self._thread = start_daemon("sqs-recall", self._run)
            if self._thread is None:
                logger.warning("sqs_backoff.no_thread_left: no message is brought forward yet")
                return
        self._changed.notify_all()

    def fault(self) -> str | None:
        """Say which thread has died, for the heartbeat; ``None``: none has."""
        thread = self._thread
        if thread is not None and not thread.is_alive() and not self._is_stopping:
            return f"the thread {thread.name} has died"
        return self.pacer.fault()

    def stop(self) -> None:
        """Bring nothing forward any more."""
        with self.lock:
            self._is_stopping = True
            self._changed.notify_all()
        self.pacer.stop()

    # Messages are brought forward

    def recall(self) -> None:
        """Let the table bring forward what is due."""
        by_queue: dict[str, list[Row]] = defaultdict(list)
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
        self.tell_now()

    def hand_over(self) -> None:
        """Let what this worker has hidden come back soon, to others, because it stops.

        Blocks for a few seconds at the most. What no call has reached comes back when its hold
        ends.
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

    # The thread

    def _run(self) -> None:
        while True:
            with self.lock:
                if self._is_stopping:
                    return
                self._changed.wait(self._pause())
            try:
                self.recall()
            except Exception as exc:  # noqa: BLE001
                # A bug. What was taken out comes back by itself; the thread must live.
                logger.error("sqs_backoff.recall_failed: %s", error_site(exc, calls=BUG_CALLS))

    def _pause(self) -> float | None:
        pauses = [gate.core.seconds_to_look for gate in self._gates.values()]
        return min((pause for pause in pauses if pause is not None), default=None)


def _tenant(key: str, task: Any, payload: Any) -> str:
    """The tenant of a call, empty if an argument is missing: then it has the gate of no tenant."""
    is_call = isinstance(payload, list | tuple) and len(payload) > 1
    args, kwargs = payload[:2] if is_call else ((), {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        return ""
    return tenant_of(key, task.run, args, kwargs)

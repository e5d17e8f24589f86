"""The providers of a worker's tasks: who may run, what is brought forward, who waits for a slot.

The decisions are those of :class:`~celery_sqs_backoff.provider.gate.ProviderGate`, one per provider
and tenant. This room gives it the worker's facts: messages that come due, how runs end, what SQS
has hidden. A thread brings messages forward; it sleeps while every provider is well.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from celery.utils.log import get_logger

from ..observe.board import ProviderNow
from ..observe.events import Recalled
from ..provider.gate import MARGIN_SECONDS, Hidden, State
from ..provider.settings import Provider
from ..provider.tenant import digest_of, tenant_of
from ..retry.policies import EqualJitter
from ..sqs.calls import Calls, Results
from ..sqs.delivery import Delivery
from ..sqs.limits import MAX_BATCH_ENTRIES
from ..sqs.settlement import Row
from ..text import BUG_CALLS, error_site, printable
from ..threads import start_daemon
from .gate import Gate
from .keeper import Keeper
from .lease import Lease
from .pacing import Fleet, Pacer
from .reports import queue_name

logger = get_logger(__name__)

#: Messages whose hiding SQS has not confirmed yet.
_MOST_PENDING: Final = 50_000

#: Between calls to bring messages forward that fail: each may leave its messages in doubt.
_AFTER_FAILURE: Final = EqualJitter(base=1, cap=10)

#: A stopping worker makes calls for so long at the most.
HAND_OVER_SECONDS: Final = 5.0

#: Names of a gate's states for those who watch it.
_STATES: Final = {State.CLOSED: "ok", State.OPEN: "paused", State.RECOVERING: "recovering"}

#: Tenants of one provider; those beyond share one gate.
MOST_TENANTS: Final = 1_000


class _Expected(NamedTuple):
    """What is known of a message that is about to be hidden; see :class:`Hidden`."""

    gate: Gate
    delivery: Delivery
    not_before: float
    own_delay_ends: float

    def hidden(self, row: Row) -> Hidden:
        return Hidden(
            row.message_id,
            row.handle,
            row.queue.url,
            row.due_at,
            not_before=self.not_before,
            next_is_last=self.delivery.is_next_the_last,
            receives=self.delivery.receive_count,
            # A probe costs a receive: with few left, not before the message's own delay ends.
            probe_from=0.0 if self.delivery.has_receives_to_spare else self.own_delay_ends,
        )


class Recalling(NamedTuple):
    """A message that is about to be brought forward."""

    gate: Gate
    hidden: Hidden


class Gates:
    """The gates of a worker, by provider and tenant.

    Arguments:
        keeper: whose clock and events they share.
        calls: from a queue's URL to its port.
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
        calls: Callable[[str], Calls],
        room: Callable[[], int],
        fleet: Callable[[tuple[str, ...], float], Fleet | None] = lambda name, rate: None,
        rng: random.Random | None = None,
        today: Callable[[], float] = time.time,
    ) -> None:
        self.lock = threading.RLock()
        self.rng = rng or random.Random()
        self.clock = keeper.clock
        self.today = today
        self.events = keeper.events
        self.pacer = Pacer(keeper.clock)
        self._calls = calls
        self._room = room
        #: Recall calls that failed, in a row, and until when none is made.
        self._failures, self._away_until = 0, 0.0
        self._fleet = fleet
        self._gates: OrderedDict[tuple[str, str], Gate] = OrderedDict()
        self._differing: set[Provider] = set()
        self._pending: dict[str, _Expected] = {}
        self._changed = threading.Condition(self.lock)
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        keeper.on_hidden = self.confirmed

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

    def expect(
        self, lease: Lease, gate: Gate, not_before: float, own_delay_ends: float = 0.0
    ) -> None:
        """Note a message that is about to be hidden, to be remembered once SQS agrees."""
        if len(self._pending) >= _MOST_PENDING:
            del self._pending[next(iter(self._pending))]
        expected = _Expected(gate, lease.delivery, not_before, own_delay_ends)
        self._pending[lease.delivery.message_id] = expected

    def confirmed(self, row: Row) -> None:
        """SQS has hidden a message. Called by the keeper's threads."""
        with self.lock:
            pending, now = self._pending.pop(row.message_id, None), self.clock()
            # If the hold may have ended before that, another worker may have the message.
            if pending is not None and not row.in_doubt and not row.may_be_visible(now):
                pending.gate.core.was_hidden(pending.hidden(row), now)

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

    def recall(self) -> int:
        """Bring forward what is due; return how many messages SQS was asked for."""
        messages = 0
        for url, batch in self.recalls():
            handles = [each.hidden.handle for each in batch]
            results = self._calls(url).change_visibility([(handle, 0) for handle in handles])
            self.answered(batch, results)
            messages += len(batch)
        return messages

    def recalls(self) -> Iterator[tuple[str, list[Recalling]]]:
        """Take out what is due now; yield each batch and its queue, for a call to SQS.

        While SQS fails there is one message now and then, and the others are kept. One that has
        waited behind slow calls is left out if its hold is about to end: another worker may have
        it when the call arrives. It comes back by itself.
        """
        if self._is_sqs_away():
            return
        by_queue: dict[str, list[Recalling]] = defaultdict(list)
        room = self._room()
        with self.lock:
            for gate in self._gates.values():
                for hidden in gate.recalls(room=room):
                    by_queue[hidden.queue].append(Recalling(gate, hidden))
        for url, taken in by_queue.items():
            while taken:
                if self._is_sqs_away():
                    self._remember_again(taken)
                    break
                size = 1 if self._failures else MAX_BATCH_ENTRIES
                batch, taken = taken[:size], taken[size:]
                certain_until = self.clock() + MARGIN_SECONDS
                if certain := [each for each in batch if each.hidden.until > certain_until]:
                    # Before the call: when SQS has answered, one may have been hidden again.
                    ids = tuple(each.hidden.message_id for each in certain)
                    self.events.emit(Recalled(queue=queue_name(url), message_ids=ids))
                    yield url, certain

    def answered(self, batch: list[Recalling], results: Results) -> None:
        """Note what SQS has answered for a batch.

        What it has certainly not done is remembered again. What is in doubt comes back by itself,
        now or when its hold ends: another worker may have it.
        """
        failed = [failure for failure in results if failure is not None and failure.is_transient]
        self._failures = self._failures + 1 if failed else 0
        if failed:
            self._away_until = self.clock() + _AFTER_FAILURE.delay(self._failures, self.rng)
        self._remember_again(
            each
            for each, failure in zip(batch, results, strict=True)
            if failure in failed and not failure.may_have_been_done
        )

    def _is_sqs_away(self) -> bool:
        return self.clock() < self._away_until

    def _remember_again(self, batch: Iterable[Recalling]) -> None:
        with self.lock:
            for gate, hidden in batch:
                gate.core.was_hidden(hidden, self.clock())

    # The worker stops

    def hand_over(self) -> None:
        """Let what this worker remembers come back soon, to others: it stops, and hides no more.

        Blocks for a few seconds at the most. What no call has reached comes back when its hold
        ends.
        """
        entries = self.handed_over()
        if not entries:
            return
        done: list[int] = []
        thread = start_daemon("sqs-handover", lambda: self._carry_out(entries, done))
        if thread is not None:
            thread.join(HAND_OVER_SECONDS)
        logger.info(
            "sqs_backoff.provider_handed_over: %d of %d hidden messages come back within %d s,"
            " because this worker stops",
            sum(done),
            len(entries),
            max(seconds for _, seconds in entries),
        )

    def handed_over(self) -> list[tuple[Hidden, int]]:
        """Take out what is to come back soon, each with its seconds; the furthest due first."""
        with self.lock:
            now = self.clock()
            return [each for gate in self._gates.values() for each in gate.core.hand_over(now)]

    def _carry_out(self, entries: list[tuple[Hidden, int]], done: list[int]) -> None:
        deadline, away = time.monotonic() + HAND_OVER_SECONDS, set[str]()
        for url, batch in batches(entries):
            if url in away:
                continue
            if time.monotonic() >= deadline:
                return
            results = self._calls(url).change_visibility(batch)
            if any(failure is not None and failure.is_of_call for failure in results):
                away.add(url)  # it is not called again and again
            done.append(results.count(None))

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


def batches(
    entries: Iterable[tuple[Hidden, int]],
) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield calls of up to ten messages, each of one queue, in order."""
    by_queue: dict[str, list[tuple[str, int]]] = {}
    for hidden, seconds in entries:
        batch = by_queue.setdefault(hidden.queue, [])
        batch.append((hidden.handle, seconds))
        if len(batch) == MAX_BATCH_ENTRIES:
            yield hidden.queue, by_queue.pop(hidden.queue)
    yield from by_queue.items()


def _tenant(key: str, task: Any, payload: Any) -> str:
    """The tenant of a call, empty if an argument is missing: then it has the gate of no tenant."""
    is_call = isinstance(payload, list | tuple) and len(payload) > 1
    args, kwargs = payload[:2] if is_call else ((), {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        return ""
    return tenant_of(key, task.run, args, kwargs)

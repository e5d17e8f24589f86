"""Limits the messages that a worker holds, and says which poller may ask SQS for more.

The window is the number of messages that may run or wait for a process. It is the number of
processes times Celery's prefetch multiplier, for example 8 * 4 = 32.

:class:`Load` computes how many messages to request now. :class:`Throughput` estimates how many
messages the worker settles (for example deletes) during a call to SQS. These two classes make no
calls and read no clock. :class:`Window` has the messages, and makes the pollers wait for room.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery.utils.log import get_logger

from ..sqs.limits import MAX_BATCH_ENTRIES
from ..sqs.queues import queue_name
from .keeper import Keeper
from .lease import Lease
from .upstream import pool_size

logger = get_logger(__name__)

#: If tasks are short, the worker receives more messages than fit into its window. If the tasks
#: suddenly become longer, these additional messages wait in the worker. So their number is limited
#: to this many times the window.
_MAX_AHEAD = 3

#: In addition to the messages that run, a worker holds this many times the number of messages that
#: it settles during one receive call. One half replaces the messages that are settled before the
#: response arrives. The other half keeps the processes busy during the next call.
_CALLS_AHEAD = 2

#: In addition to its window, a worker holds at most this many messages that wait for something
#: other than a process, for example for an ETA or a rate limit.
MAX_BLOCKED = 100

#: The window if the user wants no limit (prefetch multiplier 0).
_NO_WINDOW = 1_000_000

#: If a receive call takes longer than this, SQS has waited for messages to arrive.
_WAITED_SECONDS = 1.0

#: Weight of the newest measurement in an average.
_WEIGHT = 1 / 8

#: If there is room for only a part of a batch (10 messages, or less with a small window), a poller
#: waits this long for more room. Short tasks end in this time, and make more room. Long tasks keep
#: the pool busy, so the wait does no harm.
_LINGER_SECONDS = 0.01

#: A call on a queue with a backlog returns within this time. If a call takes longer than this, the
#: queue is empty, and SQS waits for messages.
_SOON_SECONDS = 0.1

#: No event reports a change of the pool's size, or of the number of settlements that SQS has not
#: confirmed. So a waiting poller checks again after this time.
_LOOK_AGAIN_SECONDS = 1.0

#: If more settlements of a queue than this wait for SQS's confirmation, the worker receives no
#: further messages from the queue. A settlement deletes, hides, shows or dead-letters a message.
_BEHIND = 1_000

#: If there are too many unconfirmed settlements for longer than this, the worker logs it. A burst
#: of short tasks causes no such line, because SQS confirms their settlements within this time.
_LONG_BEHIND_SECONDS = 10.0


@dataclass
class Load:
    """How many messages a worker holds, and could hold. Each attribute is a number.

    Attributes:
        processes: processes that the pool has, or could have (autoscale).
        multiplier: Celery's prefetch multiplier; 0 = no limit; 1 = no message waits for a process.
        held: messages received and not settled.
        blocked: held messages that would not start even if a process were free.
        expected: messages that calls under way are likely to bring.
        settled_during_a_call: messages that are likely to be settled during the next call.
        window: messages that may run, or wait for a process.
        room: how many more messages the worker can take when the next response arrives; may be
            negative.
        enough: with less room, a poller makes no call. It is 10 or ``window - processes``,
            the smaller of the two, but at least 1.
        batch: with less room, a poller first waits for more room.
        wanted: how many messages to ask for: 0 to 10.
    """

    processes: int
    multiplier: int
    held: int = 0
    blocked: int = 0
    expected: int = 0
    settled_during_a_call: int = 0

    def __post_init__(self) -> None:
        self.window = window = max(1, self.processes) * self.multiplier or _NO_WINDOW
        room = window - (self.held - self.blocked) - self.expected
        if window > self.processes:  # else the user wants no message to wait
            room += min(_MAX_AHEAD * window, _CALLS_AHEAD * self.settled_during_a_call)
        self.room = min(room, window + MAX_BLOCKED - self.held - self.expected)
        self.enough = enough = max(1, min(MAX_BATCH_ENTRIES, window - self.processes))
        self.batch = max(enough, min(MAX_BATCH_ENTRIES, window))
        self.wanted = min(MAX_BATCH_ENTRIES, self.room) if self.room >= enough else 0


class Throughput:
    """Estimates how many messages the worker settles while a receive call to SQS is under way.

    Times are passed in, in seconds of one clock.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._seconds_per_message = math.inf
        self._seconds_per_call = 0.0

    def settled(self, now: float, *, more: bool) -> None:
        """Note that a message was settled.

        Arguments:
            more: whether the worker still holds other messages. If not, it is idle, and the time
                until the next settlement does not count.
        """
        if self._since is not None:
            self._seconds_per_message = _smooth(self._seconds_per_message, now - self._since)
        self._since = now if more else None

    def responded(self, now: float, seconds: float, *, full: bool) -> None:
        """Note the response to a receive call.

        Only a full response within a second counts. Before any other response, SQS may have waited
        for messages.
        """
        if full and seconds < _WAITED_SECONDS:
            self._seconds_per_call = _smooth(self._seconds_per_call or seconds, seconds)
            self._since = self._since or now

    def settled_within(self, seconds: float | None = None) -> int:
        """Return how many messages a busy worker settles in ``seconds``.

        Before the first measurement, return 0. If settling was too fast to measure, return 10.

        Arguments:
            seconds: ``None`` = the average time of a call to SQS.
        """
        if self._seconds_per_message <= 0:
            return MAX_BATCH_ENTRIES
        return int(
            (self._seconds_per_call if seconds is None else seconds) / self._seconds_per_message
        )


def _smooth(average: float, value: float) -> float:
    return value if math.isinf(average) else average + (value - average) * _WEIGHT


@dataclass
class _QueueCalls:
    """The calls under way on one queue.

    ``behind_since`` is the time since which the queue has had too many unconfirmed settlements.
    """

    asked_for: int = 0
    #: Whether the last response was full. After a full response, the next response is likely to be
    #: full too, and to come without a wait.
    has_backlog: bool = False
    last_asked_at: float = 0.0
    behind_since: float | None = None

    def is_about_to_bring(self, now: float) -> bool:
        return self.has_backlog and self.asked_for > 0 and now - self.last_asked_at < _SOON_SECONDS


class Window:
    """Has the messages that a worker holds, and makes pollers wait for room. Thread-safe.

    A poller passes its queue's URL as ``queue``.

    Arguments:
        consumer: Celery's consumer. Its pool, autoscaler and prefetch multiplier may change.
        keeper: knows how many settlements of a queue SQS has not confirmed.

    Attributes:
        on_freed: called, without any lock, when a message is settled or lost.
    """

    def __init__(self, consumer: Any, keeper: Keeper) -> None:
        self._consumer, self._keeper = consumer, keeper
        self.on_freed: Callable[[], object] = lambda: None
        self._cond = threading.Condition()
        self._held: dict[str, Lease] = {}  # by delivery tag
        self._blocked: set[str] = set()
        self._running: set[str] = set()
        self._queues: defaultdict[str, _QueueCalls] = defaultdict(_QueueCalls)
        self._throughput = Throughput()

    # Messages

    def received(self, lease: Lease) -> None:
        """Count a received message in the window until ``lease.free`` is called."""
        lease.free = partial(self._free, lease)
        with self._cond:
            self._held[lease.tag] = lease

    def lease(self, tag: str) -> Lease | None:
        """Return the lease of a delivery tag, or ``None`` if its message is settled or lost."""
        return self._held.get(tag)

    def blocked(self, lease: Lease) -> None:
        """Note that a message waits for something other than a process.

        This has no effect if its task was handed to the pool.
        """
        with self._cond:
            if lease.tag in self._held and lease.tag not in self._running:
                self._blocked.add(lease.tag)
                self._cond.notify_all()

    def started(self, lease: Lease) -> None:
        """Note that a message's task was handed to the pool."""
        with self._cond:
            self._blocked.discard(lease.tag)
            if lease.tag in self._held:
                self._running.add(lease.tag)

    def _free(self, lease: Lease) -> None:
        with self._cond:
            if self._held.pop(lease.tag, None) is None:
                return  # another thread has freed it
            self._blocked.discard(lease.tag)
            self._running.discard(lease.tag)
            self._throughput.settled(self._keeper.clock(), more=bool(self._held))
            self._cond.notify_all()
        self.on_freed()

    @property
    def processes(self) -> int:
        """The number of tasks that can run at a time, counting processes that autoscale may add."""
        autoscaler = getattr(self._consumer.controller, "autoscaler", None)
        most = 0 if autoscaler is None else int(autoscaler.max_concurrency)
        return max(1, most, pool_size(self._consumer.pool))

    @property
    def has_free_process(self) -> bool:
        """Whether a task that starts now would run immediately."""
        return len(self._running) < self.processes

    def startable_within(self, seconds: float) -> int:
        """Return how many more messages could start if they arrived within ``seconds``."""
        with self._cond:
            waiting = len(self._held) - len(self._blocked)
            free = Load(self.processes, self._consumer.prefetch_multiplier).window - waiting
            return max(0, free + self._throughput.settled_within(seconds))

    # Calls

    def wait_for_room(
        self, queue: str, is_over: Callable[[], bool], *, most: int = MAX_BATCH_ENTRIES
    ) -> int:
        """Wait until a receive is worthwhile, and return how many messages to request.

        The requested messages count as expected until :meth:`responded`. Return 0 when
        ``is_over()`` is true. This method calls ``is_over`` at least once a second.
        """
        linger_until: float | None = None
        with self._cond:
            while not is_over():
                load, now = self._load(queue), self._keeper.clock()
                if self.is_behind(queue):
                    self._cond.wait(_LOOK_AGAIN_SECONDS)
                elif load.wanted == 0:
                    linger_until = None
                    soon = any(q.is_about_to_bring(now) for q in self._queues.values())
                    self._cond.wait(_SOON_SECONDS if soon else _LOOK_AGAIN_SECONDS)
                elif load.room < load.batch and (linger_until is None or now < linger_until):
                    linger_until = linger_until or now + _LINGER_SECONDS
                    self._cond.wait(max(0.0, linger_until - now))
                else:
                    return self._reserve(queue, min(most, load.wanted))
            return 0

    def take_more(self, queue: str) -> int:
        """Return how many messages one more call on a queue with a backlog may request.

        Return 0 (no call) if the queue has no backlog any more or too many unconfirmed settlements,
        or if there is no room for a full batch. A call for fewer messages would cost as much. The
        requested messages count as expected until :meth:`responded`.
        """
        with self._cond:
            load = self._load(queue)
            more = self._queues[queue].has_backlog and load.room >= MAX_BATCH_ENTRIES
            if not more or self.is_behind(queue):
                return 0
            return self._reserve(queue, load.wanted)

    def responded(self, queue: str, *, asked_for: int, messages: int, seconds: float) -> None:
        """Note the response to a call, after :meth:`received` has entered its messages."""
        full = messages >= asked_for
        with self._cond:
            calls = self._queues[queue]
            calls.asked_for -= asked_for
            calls.has_backlog = full
            self._throughput.responded(self._keeper.clock(), seconds, full=full)
            self._cond.notify_all()

    def wake(self) -> None:
        """Let all waiting pollers check again."""
        with self._cond:
            self._cond.notify_all()

    def is_behind(self, url: str) -> bool:
        """Return whether a queue has too many unconfirmed settlements to receive more messages.

        If this lasts longer than 10 seconds, log it once.
        """
        queue, waiting = self._queues[url], self._keeper.waiting_for(url)
        if waiting <= _BEHIND:
            queue.behind_since = None
            return False
        now = self._keeper.clock()
        since = queue.behind_since = now if queue.behind_since is None else queue.behind_since
        if now - since >= _LONG_BEHIND_SECONDS:
            queue.behind_since = math.inf  # so that this is logged once
            logger.warning(
                "sqs_backoff.settling_behind: queue %s: SQS has not confirmed the deletes (or"
                " other last calls) of %d messages; until it does, the worker receives no further"
                " messages from this queue",
                *(queue_name(url), waiting),
            )
        return True

    def _reserve(self, queue: str, messages: int) -> int:
        calls = self._queues[queue]
        calls.asked_for += messages
        calls.last_asked_at = self._keeper.clock()
        return messages

    def _load(self, queue: str) -> Load:
        """Return the load as the queue's poller sees it.

        A call on another queue takes up room only if that queue has a backlog and the call has just
        begun. Otherwise the call may be a long poll that brings no message for a long time.
        """
        now = self._keeper.clock()
        return Load(
            processes=self.processes,
            multiplier=self._consumer.prefetch_multiplier,
            held=len(self._held),
            blocked=len(self._blocked),
            expected=sum(
                calls.asked_for
                for name, calls in self._queues.items()
                if name == queue or calls.is_about_to_bring(now)
            ),
            settled_during_a_call=self._throughput.settled_within(),
        )

"""Counts the messages a worker holds; decides which poller may receive more. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..sqs.limits import MAX_BATCH_ENTRIES
from .demand import Load, Throughput

#: With some room, but not for a whole batch: short tasks fill it in this time, and long ones keep
#: the pool busy meanwhile.
_LINGER_SECONDS = 0.01

#: A call for a queue with a backlog that takes longer has found the queue empty: it waits.
_SOON_SECONDS = 0.1

#: Nothing signals a change of the pool's size or of the settlement backlog, so poll for it.
_LOOK_AGAIN_SECONDS = 1.0


@dataclass
class _Queue:
    """One queue's calls."""

    asked_for: int = 0
    #: Its last response brought all it could, so the next one is likely to do so, at once.
    has_backlog: bool = False
    last_asked_at: float = 0.0

    def is_about_to_bring(self, now: float) -> bool:
        return self.has_backlog and self.asked_for > 0 and now - self.last_asked_at < _SOON_SECONDS


class Capacity:
    """Counts messages by the receipt handle that they came with, and lets pollers wait for room.

    A poller names its queue by the URL.

    Arguments:
        processes: how many tasks the pool could run at once; asked each time.
        multiplier: of the prefetch window; 0 = no limit.
        is_behind: whether too many settlements of a queue wait to take on more of its messages.
        on_freed: called, without any lock, when a message is settled or blocked.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        processes: Callable[[], int],
        multiplier: Callable[[], int],
        is_behind: Callable[[str], bool] = lambda queue: False,
        on_freed: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes = processes
        self._multiplier = multiplier
        self._is_behind = is_behind
        self.on_freed = on_freed
        self._clock = clock
        lock = threading.RLock()
        self._cond = threading.Condition(lock)
        #: Waits here who cannot use room, so that the others are woken for it.
        self._aside = threading.Condition(lock)
        self._held: set[str] = set()
        self._blocked: set[str] = set()
        self._running: set[str] = set()
        self._queues: dict[str, _Queue] = {}
        self._throughput = Throughput()
        self._waiting = 0

    # Messages

    def received(self, tag: str) -> None:
        """Note that a message is held from now on."""
        with self._cond:
            self._held.add(tag)

    def blocked(self, tag: str) -> None:
        """Note that a message waits for something other than a process, unless it has started."""
        with self._cond:
            if tag in self._held and tag not in self._running:
                self._blocked.add(tag)
                self._wake_one()

    def started(self, tag: str) -> None:
        """Note that a message's task was handed to the pool."""
        with self._cond:
            self._blocked.discard(tag)
            if tag in self._held:
                self._running.add(tag)

    def freed(self, tag: str) -> None:
        """A message is settled. May be called more than once."""
        with self._cond:
            if tag not in self._held:
                return
            self._held.remove(tag)
            self._blocked.discard(tag)
            self._running.discard(tag)
            self._throughput.settled(self._clock(), more=bool(self._held))
            self._wake_one()
        self.on_freed()

    @property
    def has_free_process(self) -> bool:
        """Whether a task that is started now would run at once."""
        return len(self._running) < max(1, self._processes())

    def startable_within(self, seconds: float) -> int:
        """How many messages that arrive in the next seconds would have a place in the window."""
        with self._cond:
            waiting = len(self._held) - len(self._blocked)
            free = Load(self._processes(), self._multiplier()).window - waiting
            return max(0, free + self._throughput.settled_within(seconds))

    @property
    def held(self) -> int:
        return len(self._held)

    # Calls

    def wait_for_room(
        self, queue: str, is_over: Callable[[], bool], *, most: int = MAX_BATCH_ENTRIES
    ) -> int:
        """Wait until a receive is worthwhile; return how many messages to request.

        They count as expected until :meth:`responded`. Returns 0 when ``is_over()``.
        """
        linger_until: float | None = None
        with self._cond:
            self._waiting += 1
            try:
                while not is_over():
                    if self._is_behind(queue):
                        self._stand_aside()
                        continue
                    load = self._load(queue)
                    now = self._clock()
                    if load.wanted == 0:
                        linger_until = None
                        soon = any(q.is_about_to_bring(now) for q in self._queues.values())
                        self._cond.wait(_SOON_SECONDS if soon else _LOOK_AGAIN_SECONDS)
                    elif load.room < load.batch and (linger_until is None or now < linger_until):
                        linger_until = linger_until or now + _LINGER_SECONDS
                        self._cond.wait(max(0.0, linger_until - now))
                    else:
                        return self._reserve(queue, min(most, load.wanted))
                return 0
            finally:
                self._waiting -= 1
                self._wake_one()  # there may be room for another queue, too

    def _stand_aside(self) -> None:
        self._waiting -= 1
        self._wake_one()
        self._aside.wait(_LOOK_AGAIN_SECONDS)
        self._waiting += 1

    def take_more(self, queue: str) -> int:
        """Return how many messages a further call beside others may ask for; 0 = none.

        Only full batches: calls cost money, and the poller's own call is under way.
        """
        with self._cond:
            load = self._load(queue)
            more = self._queues[queue].has_backlog and load.room >= MAX_BATCH_ENTRIES
            if not more or self._is_behind(queue):
                return 0
            return self._reserve(queue, load.wanted)

    def responded(self, queue: str, *, asked_for: int, messages: int, seconds: float) -> None:
        """Note the response to a call; its messages have been counted by :meth:`received`."""
        full = messages >= asked_for
        with self._cond:
            calls = self._queues[queue]
            calls.asked_for -= asked_for
            calls.has_backlog = full
            self._throughput.responded(self._clock(), seconds, full=full)
            self._wake_one()

    def wake(self) -> None:
        """Let all waiting pollers check again."""
        with self._cond:
            self._cond.notify_all()
            self._aside.notify_all()

    def _reserve(self, queue: str, messages: int) -> int:
        calls = self._queues[queue]
        calls.asked_for += messages
        calls.last_asked_at = self._clock()
        return messages

    def _load(self, queue: str) -> Load:
        """The load as the queue's poller sees it.

        A long poll on another queue may bring nothing for long, so it takes no room away, unless
        that queue is known to have more and was asked just now.
        """
        self._queues.setdefault(queue, _Queue())
        now = self._clock()
        return Load(
            processes=self._processes(),
            multiplier=self._multiplier(),
            held=len(self._held),
            blocked=len(self._blocked),
            expected=sum(
                calls.asked_for
                for name, calls in self._queues.items()
                if name == queue or calls.is_about_to_bring(now)
            ),
            settled_during_a_call=self._throughput.settled_during_a_call,
        )

    def _wake_one(self) -> None:
        """Wake the poller that has waited longest."""
        if self._waiting:
            self._cond.notify()

"""When the worker asks SQS for more: in batches worth a call, and as soon as there is room."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from celery.utils.log import get_logger
from kombu.transport import SQS
from vine import promise

from ..limits import MAX_BATCH_ENTRIES
from ..policies import EqualJitter
from ..queues import error_code
from . import upstream
from .keeper import Keeper
from .pace import Pace

__all__ = ["LeaseQoS", "install"]

logger = get_logger(__name__)

#: With some room, but not for a whole batch: short tasks fill it in this time, and long ones keep
#: the pool busy meanwhile.
_LINGER_SECONDS = 0.01

#: Should a place in the prefetch window become free unnoticed, polling goes on after this long.
_SAFETY_NET_SECONDS = 1.0

#: Between receives that fail: SQS is unreachable, or the credentials have expired.
_AFTER_FAILURE = EqualJitter(base=1, cap=10)

#: Windows that may be asked for because they will be free in time. If tasks suddenly take longer,
#: so many more messages wait, under their leases.
_MAX_AHEAD = 2

#: Places, where the user wants no limit (prefetch multiplier 0).
_NO_WINDOW = 1_000_000

#: Calls for one queue at the same time, while it has a backlog and there is room for all answers.
_MAX_IN_THE_AIR = 3


class LeaseQoS(SQS.QoS):  # type: ignore[misc]  # kombu is not typed
    """kombu's prefetch window, without its three costs on SQS.

    kombu asks for one message as soon as one place is free: with short tasks, a call per task.
    Once it finds no place free it pauses (kombu 5.7: for ``polling_interval``, a second). And it
    waits for each answer before it asks again. This one asks when the messages waiting for a
    process have all gone (the window less one per process is free, or ten places are), a moment
    later if that makes it a full batch; it looks again when a message is settled; and while
    batches come back full it has several calls under way. It asks for no more than there will be
    room for when the answer is here, as far as the last messages tell: with tasks shorter than a
    call, whose pool would be idle otherwise, up to two more windows. With a multiplier of 1 it
    counts on nothing.

    A closing channel gives its messages back to SQS; those under a lease are the keeper's.
    """

    def __init__(
        self,
        channel: Any,
        prefetch_count: int,
        *,
        keeper: Keeper,
        processes: int,
        only_when_idle: bool,
    ) -> None:
        super().__init__(channel, prefetch_count)
        self._keeper = keeper
        self._processes = processes
        self._only_when_idle = only_when_idle
        self._thirsty: set[str] = set()
        self._in_the_air: Counter[str] = Counter()  # calls
        self._asked_for: Counter[str] = Counter()  # messages that they may bring
        self._pace = Pace()
        self._will_look = False
        self._has_safety_net = False
        self._allowance: int | None = None
        self._failures = 0
        self._came_full = False
        upstream.survive_failed_receives(channel, self._on_receive)

    def can_consume(self) -> bool:
        return self._room() >= self._enough()

    def can_consume_max_estimate(self) -> int:
        """How many messages the next call may ask for (kombu makes it 1 to 10)."""
        return max(0, self._room() if self._allowance is None else self._allowance)

    def _held(self) -> int:
        return len(self._delivered) - len(self._dirty)

    def _room(self, queue: str | None = None) -> int:
        """Places free; with a queue, as it will be when the answer to a call for it is here."""
        if self._keeper.is_behind:
            return 0
        room = self._window() - self._held()
        if queue is not None:
            room -= self._asked_for[queue]
            if self._window() > self._processes:  # else the user wants none to wait
                room += min(_MAX_AHEAD * self._window(), self._pace.settled_during_a_call())
        return room

    def _window(self) -> int:
        return int(self.prefetch_count) or _NO_WINDOW

    def _enough(self) -> int:
        """Places that must be free for a call."""
        if self._only_when_idle:
            return self._window()
        if self.channel.hub is None:  # gevent, eventlet: kombu sleeps for a second when told no
            return 1
        return max(1, min(MAX_BATCH_ENTRIES, self._window() - self._processes))

    def _batch(self) -> int:
        """Places that let a call be made without waiting for more."""
        return max(self._enough(), min(MAX_BATCH_ENTRIES, self._window()))

    # From here on: workers with an event loop

    def ack(self, delivery_tag: str) -> None:
        super().ack(delivery_tag)
        self._pace.settled(more=self._held() > 0)
        if self._thirsty and not self._will_look and self.can_consume():
            self._will_look = True
            self.channel.hub.call_soon(self._look)  # this may be a pool's thread

    def _look(self) -> None:
        self._will_look = False
        if any(self._room(queue) >= self._batch() for queue in self._thirsty):
            self._poll_thirsty()
        else:
            self.channel.hub.call_later(_LINGER_SECONDS, self._poll_thirsty)

    def schedule_queue(self, queue: str) -> None:
        """Stand in for ``Channel._schedule_queue``: ask now, or note to ask when there is room."""
        if queue not in self.channel._active_queues:
            return
        if self._room(queue) >= self._batch():
            self._poll(queue)
            return
        self._thirsty.add(queue)
        if self._room(queue) >= self._enough():
            self.channel.hub.call_later(_LINGER_SECONDS, self._poll_thirsty)
        elif not self._has_safety_net:
            self._has_safety_net = True
            self.channel.hub.call_later(_SAFETY_NET_SECONDS, self._on_safety_net)

    def _on_safety_net(self) -> None:
        self._has_safety_net = False
        self._poll_thirsty()

    def _poll_thirsty(self) -> None:
        thirsty, self._thirsty = self._thirsty, set()
        for queue in thirsty:
            if queue in self.channel._active_queues and self._room(queue) >= self._enough():
                self._poll(queue)
            else:
                self.schedule_queue(queue)

    def _poll(self, queue: str) -> None:
        """Ask SQS, and go on with kombu's loop when the answer is there."""
        self._ask(queue, self._go_on)

    def _go_on(self, queue: str, messages: int) -> None:
        if self._failures:
            pause = _AFTER_FAILURE.delay(self._failures)
            self.channel.hub.call_later(pause, self.schedule_queue, queue)
            return
        if self._came_full:
            self._poll_backlog(queue)
        self.channel._loop1(queue, messages)

    def _poll_backlog(self, queue: str) -> None:
        """Beside kombu's one call at a time, one more, as long as they come back full."""
        if (
            self._in_the_air[queue] < _MAX_IN_THE_AIR - 1  # less the one that goes on
            and self._room(queue) >= 2 * self._batch()
        ):
            self._ask(queue, self._after_backlog)

    def _after_backlog(self, queue: str, messages: int) -> None:
        if self._came_full and not self._failures:
            self._poll_backlog(queue)
        if queue in self._thirsty:
            self._look()

    def _ask(self, queue: str, then: Callable[[str, int], None]) -> None:
        asked_for = max(1, min(MAX_BATCH_ENTRIES, self._room(queue)))
        asked_at = time.monotonic()

        def on_answer(messages: int | None) -> None:  # kombu 5.5 says None for none
            messages = messages or 0
            self._in_the_air[queue] -= 1
            self._asked_for[queue] -= asked_for
            self._came_full = messages >= asked_for
            self._pace.answered(time.monotonic() - asked_at, full=self._came_full)
            then(queue, messages)

        self._allowance = asked_for
        self._in_the_air[queue] += 1
        self._asked_for[queue] += asked_for
        try:
            self.channel._get_bulk_async(queue, callback=promise(on_answer))
        except (BotoCoreError, ClientError) as exc:  # no credentials, or no role to assume
            self._on_receive(error_code(exc))
            on_answer(0)
        finally:
            self._allowance = None

    def _on_receive(self, error: str | None) -> None:
        """Count failures in a row; say when they begin and when they end."""
        if error and not self._failures:
            logger.warning("sqs_backoff.receive_failed: %s; trying again until it works", error)
        elif self._failures and not error:
            logger.info("sqs_backoff.receiving_again: after %d failures", self._failures)
        self._failures = self._failures + 1 if error else 0

    # A channel that closes

    def restore_unacked_once(self, stderr: Any = None) -> None:
        for tag, message in list(self._delivered.items()):
            if hasattr(message, "sqs_lease"):
                self._quick_ack(tag)
        super().restore_unacked_once(stderr)


def install(channel: Any, *, keeper: Keeper, processes: int, only_when_idle: bool) -> LeaseQoS:
    """Replace the prefetch window of a channel that has received nothing yet.

    Arguments:
        channel: kombu's channel.
        keeper: no more is asked for while it is behind.
        processes: of the pool: places in the window that running tasks take.
        only_when_idle: ask only when every place is free.
    """
    old = channel.qos
    old._on_collect.cancel()
    qos = LeaseQoS(
        channel,
        old.prefetch_count,
        keeper=keeper,
        processes=processes,
        only_when_idle=only_when_idle,
    )
    channel._qos = qos
    if channel.hub is not None:
        channel._schedule_queue = qos.schedule_queue
    return qos

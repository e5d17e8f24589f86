"""Receives the messages of one queue by long polls, in threads of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from celery.utils.log import get_logger

from ..observe.events import Polled, ReceiveFailed, ReceivingAgain
from ..retry.policies import EqualJitter
from ..sqs.calls import Received
from ..sqs.limits import MAX_BATCH_ENTRIES
from ..sqs.queues import queue_name
from ..text import BUG_CALLS, error_site
from ..threads import call_in_time

if TYPE_CHECKING:
    from .receive import Receiver

logger = get_logger(__name__)

#: Backoff after a failed receive, for example while SQS is unreachable.
_AFTER_FAILURE = EqualJitter(base=1, cap=10)

#: The highest number of receive calls on one queue at a time. There is only one call, unless the
#: queue has a backlog and the worker has room for more messages.
_MAX_CALLS = 3

#: If an empty response arrives within this time, SQS did not wait for messages. Perhaps the server
#: does not support long polls, or the queue has reached its quota of in-flight messages.
_TOO_SOON_SECONDS = 0.2
#: Pause after such an early, empty response.
_AFTER_TOO_SOON_SECONDS = 1.0

#: While the worker has no room for messages, the poller reads the queue's attributes again after
#: this time. Otherwise the attributes could be hours old, because a worker whose tasks run for
#: hours may have no room for hours.
_WAIT_FOR_ROOM_SECONDS = 30.0

#: If one round of the thread's loop takes this many seconds more than its long poll and pause
#: together, the heartbeat reports the thread as hung. A shorter limit could report a healthy
#: thread, because fetching credentials, connecting and timeouts take time.
_LONGEST_TURN_SECONDS = 40.0

#: A response should arrive at most this long after the end of the long poll. A later response was
#: delayed, for example because the machine was suspended. When a delayed response arrives, a part
#: of the messages' visibility timeout is over already.
_ON_THE_WAY_SECONDS = 1.0


class Poller:
    """Receives from one queue by long polls. While the queue has a backlog, more threads help.

    No exception ends the poller. Its threads are daemons, which stop with the process.

    Arguments:
        receiver: takes the messages of each response, and reads the queue's attributes before each
            long poll. The receiver's methods run in the poller's threads.
        name: the name of the queue in Celery.
        url: the URL of the queue.
        wait_seconds: the length of the long poll, 0 to 20. Default 20; 0 = the user wants no long
            poll.
        pause_seconds: the pause after a receive without a message, if ``wait_seconds`` is 0.
            Default 1.
    """

    def __init__(
        self,
        receiver: Receiver,
        name: str,
        url: str,
        *,
        wait_seconds: int = 20,
        pause_seconds: float = _AFTER_TOO_SOON_SECONDS,
    ) -> None:
        self.url, self._celery_name = url, name
        self.queue_name = queue_name(url)  # the name on SQS, as in all events
        self._receiver, self._window = receiver, receiver.window
        self._keeper = keeper = receiver.keeper
        self._events, self._pulse, self._clock = keeper.events, keeper.pulse, keeper.clock
        self._name = f"the poller of {url}"
        self._calls = receiver.clients.polling(url)
        # On a FIFO queue, receive one message per call. One call for ten messages could return
        # several of the same group, which would then run side by side. After a single message, SQS
        # holds back the rest of its group until the message is deleted or visible again.
        self._most = 1 if url.endswith(".fifo") else MAX_BATCH_ENTRIES
        self._wait_seconds = wait_seconds
        self._pause_seconds = pause_seconds
        self._failures = 0  # in a row
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._stopped.set()
        self._main: threading.Thread | None = None
        self._helpers = 0  # threads that receive in addition to the main one

    def start(self) -> None:
        """Start a thread that receives, unless the thread of an earlier start is still running."""
        with self._lock:
            self._stopped.clear()
            if not self._is_alive():
                thread_name = f"sqs-poll-{self.queue_name}"
                self._main = threading.Thread(target=self._run, name=thread_name, daemon=True)
                self._main.start()  # may raise: without this thread no message is received
        limit = self._wait_seconds + self._pause_seconds + _LONGEST_TURN_SECONDS
        self._pulse.watch(self._name, limit_seconds=limit, is_alive=self._is_alive)

    def stop(self) -> None:
        """Stop receiving. The receiver still gets the messages of a call that is under way."""
        self._pulse.forget(self._name)
        with self._lock:
            self._stopped.set()
        self._window.wake()

    # The threads

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopped.is_set():
                    self._main = None  # the next start creates another thread
                    return
            with self._survives():
                self._poll()

    def _help(self) -> None:
        """Receive in a helper thread, in addition to the main thread.

        Go on while the queue has a backlog and the worker has room for more messages.
        """
        with self._survives():
            while not self._stopped.is_set() and (more := self._window.take_more(self.url)):
                self._receive(more, wait_seconds=0, is_main=False)
        with self._lock:
            self._helpers -= 1

    @contextmanager
    def _survives(self) -> Iterator[None]:
        """Log an exception in the block, which can only be a bug, and pause. Do not raise it."""
        try:
            yield
        except BaseException as exc:  # noqa: BLE001  # the queue must still be polled
            logger.error(
                "sqs_backoff.poller_failed: queue %s: %s",
                *(self.queue_name, error_site(exc, calls=BUG_CALLS)),
            )
            self._stopped.wait(_AFTER_FAILURE.delay(1, random))

    def _poll(self) -> None:
        self._pulse.note_turn(self._name)
        self._queue = self._receiver.read_queue(self.url)
        until = self._clock() + _WAIT_FOR_ROOM_SECONDS
        asked_for = self._window.wait_for_room(
            self.url, partial(self._is_over, until), most=self._most
        )
        if asked_for:
            self._receive(asked_for, wait_seconds=self._wait_seconds, is_main=True)

    def _is_over(self, until: float) -> bool:
        """Return whether the main thread should stop waiting for room.

        Also tell the heartbeat that the thread is alive. The window calls this at least once a
        second.
        """
        self._pulse.note_turn(self._name)
        return self._stopped.is_set() or self._clock() >= until

    def _is_alive(self) -> bool:
        main = self._main
        return main is not None and main.is_alive()

    def _receive(self, asked_for: int, *, wait_seconds: int, is_main: bool) -> None:
        asked_at, brought, seconds = self._clock(), 0, 0.0
        try:
            hidden_seconds = self._keeper.seconds_to_receive_for(self._queue)
            received = self._calls.receive(
                max_messages=asked_for,
                wait_seconds=wait_seconds,
                visibility_timeout_seconds=hidden_seconds,
            )
            brought, seconds = len(received.messages), self._clock() - asked_at
            # Emit the event now, so that observers get it before the events of settlements.
            self._tell(received)
            if received.messages:
                self._receiver.take(
                    self._celery_name,
                    self._queue,
                    received.messages,
                    seconds_ago=max(0.0, seconds - wait_seconds - _ON_THE_WAY_SECONDS),
                    hidden_seconds=hidden_seconds,
                )
        finally:
            self._window.responded(self.url, asked_for=asked_for, messages=brought, seconds=seconds)
        if received.failure is not None:
            self._stopped.wait(_AFTER_FAILURE.delay(max(1, self._failures), random))
        elif brought >= asked_for:
            self._start_helper()
        elif not brought and is_main:  # a helper thread ends instead of pausing
            self._pause(seconds)

    def _tell(self, received: Received) -> None:
        """Emit the events about one receive call, and count the failed calls in a row."""
        failures, queue = self._failures, self.queue_name
        if received.failure is not None:
            self._failures = failures + 1
            code = received.failure.code
            self._events.emit(ReceiveFailed(queue=queue, code=code, failures=self._failures))
            return
        self._failures = 0
        if failures:
            self._events.emit(ReceivingAgain(queue=queue, failures=failures))
        ids = tuple(message["MessageId"] for message in received.messages)
        self._events.emit(Polled(queue=queue, message_ids=ids))

    def _pause(self, seconds: float) -> None:
        """Pause after a receive call without messages, unless SQS has waited for messages."""
        if not self._wait_seconds:
            self._stopped.wait(self._pause_seconds)
        elif seconds < _TOO_SOON_SECONDS:
            self._stopped.wait(_AFTER_TOO_SOON_SECONDS)

    def _start_helper(self) -> None:
        """Start a helper thread after a full response.

        A poller has at most two helper threads. On a FIFO queue it has only the main thread.
        """
        with self._lock:
            is_full = self._helpers >= _MAX_CALLS - 1 or self._most < MAX_BATCH_ENTRIES
            if is_full or self._stopped.is_set():
                return
            self._helpers += 1
        if call_in_time(self._help, seconds=0) is None:
            with self._lock:
                self._helpers -= 1  # the machine has no thread left, so go on without a helper

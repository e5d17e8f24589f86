"""Slots that the workers of all machines share in the app's store.

A slot is a time at which one call to the provider may begin (:mod:`.rate`). The store has one
record for a provider's slots. A worker reads the record, and takes slots for several messages by
one conditional write. If another worker has written in between, the write fails, and the worker
reads the record again.

The clocks of the workers differ. The record has the time of the clock that is furthest ahead, and
all workers go by this time. If a worker went by its own slower clock, the free slots would seem too
far away.

The store is away if it does not answer. While the store is away, each worker makes its share of the
calls, for example a tenth with ten workers. When the store answers again, the workers notice its
return one after the other. The first worker to notice it writes into the record that all workers
keep to their shares for ten seconds more. If this worker took slots at once, its calls and the
shares of the other workers would together exceed the agreed rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..store.errors import StoreUnavailable
from ..store.records import Records
from .rate import Times

#: The store keeps the record for this many seconds after the next free time of return, which
#: :mod:`.rate` explains.
KEEP_SECONDS = 600.0

#: When the store answers again, all workers keep to their shares for this many seconds. In this
#: time each worker notices that the store answers, even if its last call must first time out. After
#: the timeout and a short pause, the worker asks again.
APART_SECONDS = 10.0

#: If this many writes in a row fail because other workers were faster, the store counts as away.
_MOST_TRIES = 50


def present_seconds(rate: float) -> float:
    """Return for how many seconds after its last write a worker counts as one of the fleet.

    In this time each of a hundred workers can take a slot. A worker that has ended counts for this
    time, too. If the store goes away in this time, the share of the ended worker stays unused. With
    a longer time, more of the rate would stay unused.

    Arguments:
        rate: slots a second.
    """
    return max(30.0, 100.0 / rate)


@dataclass(frozen=True, slots=True)
class Taken:
    """The store's response to one worker. Times are of the worker's clock, in seconds.

    Attributes:
        slots: the times of the slots, at most as many as the worker has asked for, all within the
            next ``AHEAD_SECONDS``.
        returns: when SQS should show each message that the worker hides; ``None`` = the next free
            time is too late for this message.
        times: the next free slot, and the next free time of return.
        apart_until: the time until which each worker keeps to its own share.
        workers: the number of workers in the fleet (:func:`present_seconds`), including this
            worker.
    """

    slots: list[float]
    returns: list[float | None]
    times: Times
    apart_until: float
    workers: int


class FleetSlots:
    """Gives slots at one rate to all workers that share a store.

    Args:
        records: the records in the app's store.
        name: the provider's name, and the tenant's name if there is one.
        rate: slots a second, above 0.
        worker: this worker's name.
        clock: returns the seconds of this worker's clock.
    """

    def __init__(
        self,
        records: Records,
        name: tuple[str, ...],
        *,
        rate: float,
        worker: str,
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        # The rate is in the key, because after a change of rate the old times are wrong.
        self._name = json.dumps([*name, rate])
        self._rate = rate
        self._worker = worker
        self._clock = clock
        #: Seconds to add to this worker's clock to get the fleet's time. At first, the worker takes
        #: its time of day as the fleet's time. If it then reads a later time in the store's record,
        #: it uses that time.
        self._ahead = time.time() - clock()

    def take(self, slots: int, holds: Sequence[float] = (), *, is_back: bool = False) -> Taken:
        """Reserve slots, and for each message to hide the time at which it comes back.

        Block until the store responds.

        Arguments:
            slots: the number of slots that the worker wants.
            holds: for each message to hide, the longest time in seconds that it may be hidden.
            is_back: whether this is the worker's first call since the store was away.

        Raises:
            StoreUnavailable: the store did not answer, or other workers were faster each time. If
                the store has recorded slots in spite of the error, they stay unused.
        """
        present = present_seconds(self._rate)
        for _ in range(_MOST_TRIES):
            there = self._records.get("rate", self._name)
            old = {} if there is None else there.fields
            now = self._clock()
            self._ahead = max(self._ahead, old.get("now", 0.0) - now)
            ahead = self._ahead
            apart_until = old.get("apart_until", 0.0) - ahead
            if is_back and apart_until <= now:
                apart_until = now + APART_SECONDS
            times = Times(old.get("free_at", 0.0) - ahead, old.get("back_at", 0.0) - ahead)
            taken = times.take_slots(0 if now < apart_until else slots, now, self._rate)
            returns = times.take_returns(holds, now, self._rate)
            workers = {
                name: at
                for name, at in old.get("workers", {}).items()
                if now + ahead - present < at
            }
            was_seen = workers.get(self._worker, 0.0) > now + ahead - present / 2
            workers[self._worker] = round(now + ahead, 1)
            new = {
                "free_at": times.free_at + ahead,
                "back_at": times.back_at + ahead,
                "apart_until": apart_until + ahead,
                "workers": workers,
                "now": now + ahead,
            }
            ttl = times.back_at - now + KEEP_SECONDS
            if there is None:
                is_done = self._records.add("rate", self._name, new, ttl).is_new
            elif was_seen and not (taken or holds or is_back):
                # There is nothing to record, and a write could make the writes of others fail.
                is_done = True
            else:
                is_done = self._records.replace(there, new, ttl) is not None
            if is_done:
                return Taken(taken, returns, times, apart_until, len(workers))
        raise StoreUnavailable("other workers were faster each time")

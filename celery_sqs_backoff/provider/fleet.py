"""Slots that the workers of all machines share in the app's store.

One atomic call takes slots for several messages. Redis does it in one script, by its own clock.
Other stores do it by one conditional write, which is repeated if another worker was faster. There
the clock that is furthest ahead counts: a worker that reads a later time than its own uses that
time. With its own clock, a worker that is behind would get slots that are too far away.

While the store is away, each worker makes its share of the calls. The workers notice the store's
return one after the other. The first one lets all workers keep to their shares for some seconds
more. Otherwise its slots and the other shares would exceed the agreed rate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..store.errors import StoreUnavailable
from ..store.records import Record, Records
from .rate import AHEAD_SECONDS, RETURN_SHARE, Assigned, Times, assign

#: The store keeps the record for this time after the last time of return in it.
KEEP_SECONDS = 600.0

#: All workers keep to their shares for this time after the store's return. Each worker notices the
#: return within the timeout of a call and the pause after it.
APART_SECONDS = 10.0

#: Longest time of return. SQS hides a message for at most 12 hours after its receive.
LONGEST_RETURN_SECONDS = 11 * 3600.0

#: After this many writes that lost to other workers, the store counts as away.
_MOST_TRIES = 20


def present_seconds(rate: float) -> float:
    """Return for how long a worker that took no slot counts as one of the fleet.

    Within this time each of a hundred workers can take a slot. It is not longer, because while the
    store is away, the share of a worker that has ended is unused.

    Arguments:
        rate: slots a second.
    """
    return max(30.0, 100.0 / rate)


@dataclass(frozen=True, slots=True)
class Taken:
    """The store's response to one worker. Times are of the store's clock, in seconds.

    Attributes:
        assigned: slots and times of return.
        workers: the number of workers that have asked lately, with this one.
        now: the time of the response.
        apart_until: the time until which each worker keeps to its own share.
    """

    assigned: Assigned
    workers: int
    now: float
    apart_until: float = 0.0


#: The script does the same as :func:`advance`, by the clock of the Redis server. Times are
#: milliseconds.
_ADVANCE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local worker, present, keep = 'worker:' .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local slot_apart, back_apart = tonumber(ARGV[4]), tonumber(ARGV[5])
local slots, returns = tonumber(ARGV[6]), tonumber(ARGV[7])
local ahead, apart_for, within = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local free, back, apart, workers = 0, 0, 0, 1
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local value = tonumber(fields[i + 1])
  if fields[i] == 'free' then free = value
  elseif fields[i] == 'back' then back = value
  elseif fields[i] == 'apart' then apart = value
  elseif fields[i] ~= worker then
    if value > now - present then workers = workers + 1
    else redis.call('HDEL', KEYS[1], fields[i]) end
  end
end
if apart_for > 0 and apart <= now then apart = now + apart_for end
free = math.max(free, now)
local taken, times = 0, {}
while taken < slots and apart <= now and free <= now + ahead do
  taken = taken + 1
  times[taken] = string.format('%.3f', free)
  free = free + slot_apart
end
back = math.max(back, free)
for i = 1, returns do
  if back > now + within then break end
  times[taken + i] = string.format('%.3f', back)
  back = back + back_apart
end
free, back, apart = string.format('%.3f', free), string.format('%.3f', back),
                    string.format('%.3f', apart)
redis.call('HSET', KEYS[1], 'free', free, 'back', back, 'apart', apart,
           worker, string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', tonumber(back) - now + keep))
return {workers, taken, string.format('%.3f', now), apart, free, back, unpack(times)}
"""


class FleetSlots:
    """One rate for all workers that share a store. Its calls block.

    Args:
        records: the records in the app's store.
        name: the provider's name, and its tenant's, if any.
        rate: slots a second, above 0.
        worker: this worker's name.
        now: seconds since the epoch, for stores without a clock.
    """

    def __init__(
        self,
        records: Records,
        name: tuple[str, ...],
        *,
        rate: float,
        worker: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        # The rate is in the key, because after a change of rate the old times are wrong.
        self._name = json.dumps([*name, rate])
        self._rate = rate
        self._worker = worker
        self._now = now
        self._last: Record | None = None
        self._ahead = 0.0

    def take(
        self,
        slots: int,
        returns: int = 0,
        *,
        within: float = LONGEST_RETURN_SECONDS,
        is_back: bool = False,
    ) -> Taken:
        """Take slots, and times of return for messages that are hidden.

        Arguments:
            slots, returns: how many of each are wanted.
            within: the most seconds until a time of return.
            is_back: whether this is the worker's first call since the store was away.

        Raises:
            StoreUnavailable: the store did not answer. If it has given slots, they are lost.
        """
        run_script = getattr(self._records.store, "run_script", None)  # Redis has it
        if run_script is None:
            return self._take_by_writes(slots, returns, within, is_back)
        apart = 1000 / self._rate, 1000 / (self._rate * RETURN_SHARE)
        workers, taken, *found = run_script(
            _ADVANCE,
            self._records.key("rate", self._name),
            self._worker,
            present_seconds(self._rate) * 1000,
            KEEP_SECONDS * 1000,
            *apart,
            slots,
            returns,
            AHEAD_SECONDS * 1000,
            APART_SECONDS * 1000 * is_back,
            within * 1000,
        )
        now, apart_until, free_at, back_at, *times = (float(each) / 1000 for each in found)
        first = int(taken)
        assigned = Assigned(times[:first], times[first:], Times(free_at, back_at))
        return Taken(assigned, int(workers), now, apart_until)

    def _take_by_writes(self, slots: int, returns: int, within: float, is_back: bool) -> Taken:
        for _ in range(_MOST_TRIES):
            now = self._fleets_time()
            old = None if self._last is None else self._last.fields
            new, taken = advance(
                old,
                self._worker,
                slots,
                returns,
                rate=self._rate,
                now=now,
                within=within,
                is_back=is_back,
            )
            if self._write(new, taken.assigned.times.back_at - now + KEEP_SECONDS):
                return replace(taken, now=self._fleets_time())
        raise StoreUnavailable("other workers were faster each time")

    def _fleets_time(self) -> float:
        here = self._now()
        if self._last is not None:
            self._ahead = max(self._ahead, self._last.fields.get("now", 0.0) - here)
        return here + self._ahead

    def _write(self, new: dict[str, Any], ttl: float) -> bool:
        """Replace the record that was read last. If it has changed, read it again."""
        if self._last is None:
            self._last = self._records.add("rate", self._name, new, ttl)
            return self._last.is_new
        written = self._records.replace(self._last, new, ttl)
        self._last = written or self._records.reread(self._last)
        return written is not None


def advance(
    old: dict[str, Any] | None,
    worker: str,
    slots: int,
    returns: int = 0,
    *,
    rate: float,
    now: float,
    within: float = LONGEST_RETURN_SECONDS,
    is_back: bool = False,
) -> tuple[dict[str, Any], Taken]:
    """Assign slots and times of return, and return the new record with them."""
    record = old or {}
    apart_until = record.get("apart_until", 0.0)
    if is_back and apart_until <= now:
        apart_until = now + APART_SECONDS
    times = Times(record.get("free_at", 0.0), record.get("back_at", 0.0))
    wanted = 0 if now < apart_until else slots
    assigned = assign(times, now, slots=wanted, returns=returns, rate=rate, within=within)
    seen = {
        name: at
        for name, at in record.get("workers", {}).items()
        if now - present_seconds(rate) < at and name != worker
    }
    seen[worker] = round(now, 1)
    new = {**asdict(assigned.times), "apart_until": apart_until, "workers": seen, "now": now}
    return new, Taken(assigned, len(seen), now, apart_until)

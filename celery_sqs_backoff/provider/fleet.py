"""Slots that the workers of all machines share in the app's store, by one atomic call for several
messages.

Redis does it in one script, by its own clock. Other stores do it by one conditional write, repeated
when another worker was faster. There the clock of the machine that is ahead counts, because a
worker that reads a later time than its own goes by that time. With its own clock, a worker that is
behind would get slots that are too far away.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..store.errors import StoreUnavailable
from ..store.records import Record, Records
from .rate import RETURN_SHARE, Place, Times, assign

#: The record stays for this time after the last place.
KEEP_SECONDS = 600.0

#: Lua cannot read infinity.
_LONGEST_SECONDS = 1e9

#: Writes that other workers were faster than, before the store counts as away.
_MOST_TRIES = 20


def present_seconds(rate: float) -> float:
    """Return for how long a worker that took no slot counts as one of the fleet.

    Within this time each of a hundred workers takes a slot. It is not longer, because while the
    store is away, the share of a worker that is gone is lost.

    Arguments:
        rate: slots a second.
    """
    return max(30.0, 100.0 / rate)


@dataclass(frozen=True, slots=True)
class Taken:
    """The places that the messages of a worker have got.

    Attributes:
        places: of each message, with times in seconds from ``now``.
        workers: the number that has asked lately, with this one.
        now: when the store handed them out, by the fleet's clock.
    """

    places: list[Place]
    workers: int
    now: float = field(default=0.0, compare=False)


#: :func:`advance`, by the clock of the Redis server. Times are milliseconds.
_ADVANCE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local worker, present = 'worker:' .. ARGV[1], tonumber(ARGV[2])
local slot_apart, back_apart = tonumber(ARGV[4]), tonumber(ARGV[5])
local free, back, workers = 0, 0, 1
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local value = tonumber(fields[i + 1])
  if fields[i] == 'free' then free = value
  elseif fields[i] == 'back' then back = value
  elseif fields[i] ~= worker then
    if value > now - present then workers = workers + 1
    else redis.call('HDEL', KEYS[1], fields[i]) end
  end
end
local places = {}
for i = 6, #ARGV do
  local slot = math.max(free, now)
  if slot - now <= tonumber(ARGV[i]) then
    places[i - 5] = string.format('1 %.3f', slot - now)
    free = slot + slot_apart
  else
    back = math.max(back, slot)
    places[i - 5] = string.format('0 %.3f', back - now)
    back = back + back_apart
  end
end
redis.call('HSET', KEYS[1], 'free', string.format('%.3f', free),
           'back', string.format('%.3f', back), worker, string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(free, back, now) - now + ARGV[3]))
return {workers, string.format('%.3f', now), unpack(places)}
"""


class FleetSlots:
    """One rate for all workers that share a store. Its calls block.

    Args:
        records: the app's.
        name: of the provider, and of its tenant.
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
        self._name = json.dumps(name)
        self._rate = rate
        self._worker = worker
        self._now = now
        self._last: Record | None = None
        self._ahead = 0.0

    def take(self, longest: Sequence[float]) -> Taken:
        """Get a place for each message, given the longest that each may wait.

        Without messages it only reports this worker.

        Raises:
            StoreUnavailable: the store did not answer. Slots that it may have given are lost.
        """
        run_script = getattr(self._records.store, "run_script", None)  # Redis has it
        if run_script is None:
            return self._take_by_writes(longest)
        apart = 1000 / self._rate, 1000 / (self._rate * RETURN_SHARE)
        waits = [min(seconds, _LONGEST_SECONDS) * 1000 for seconds in longest]
        workers, now, *found = run_script(
            _ADVANCE,
            self._records.key("rate", self._name),
            self._worker,
            present_seconds(self._rate) * 1000,
            KEEP_SECONDS * 1000,
            *apart,
            *waits,
        )
        split = [each.split() for each in found]
        places = [Place(float(wait) / 1000, is_slot == "1") for is_slot, wait in split]
        return Taken(places, int(workers), float(now) / 1000)

    def _take_by_writes(self, longest: Sequence[float]) -> Taken:
        for _ in range(_MOST_TRIES):
            now = self._fleets_time()
            old = None if self._last is None else self._last.fields
            new, places, workers = advance(old, self._worker, longest, self._rate, now)
            last = max((place.at for place in places), default=now)
            if self._write(new, last - now + KEEP_SECONDS):
                now = self._fleets_time()
                return Taken([Place(each.at - now, each.is_slot) for each in places], workers, now)
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
    old: dict[str, Any] | None, worker: str, longest: Sequence[float], rate: float, now: float
) -> tuple[dict[str, Any], list[Place], int]:
    """Assign places, and return the new record, the places, and the number of workers."""
    record = old or {}
    times = Times(record.get("free_at", 0.0), record.get("back_at", 0.0))
    places, times = assign(times, now, longest, rate=rate)
    seen = {
        name: at
        for name, at in record.get("workers", {}).items()
        if now - present_seconds(rate) < at and name != worker
    }
    seen[worker] = round(now, 1)
    return {**asdict(times), "workers": seen, "now": now}, places, len(seen)

"""Which hidden messages may a worker bring forward, and in which order?

A worker that hid a message owns its receipt handle until SQS shows it again. This is the bounded
memory of those handles. Pure: no clock, no calls.

What may be recalled:

* only a message whose ChangeMessageVisibility SQS has confirmed (the caller remembers no other),
* never within ``MARGIN_SECONDS`` of the end of our hold: another worker may have it by then,
* never before its ``not_before`` (the provider's Retry-After),
* on FIFO queues a group by its first message; those that were hidden behind it come with it.

The messages due furthest come first: the others return soon by themselves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from ..sqs.delivery import Delivery

__all__ = ["DEFAULT_LIMIT", "MARGIN_SECONDS", "Hidden", "Memory", "probe_from"]

#: Our clock, SQS's clock and a call under way can differ by this much.
MARGIN_SECONDS = 5.0

#: About 1 KB each: the handle is most of it.
DEFAULT_LIMIT = 20_000


@dataclass(frozen=True, slots=True)
class Hidden:
    """A message that this worker has hidden, as SQS confirmed. Times are seconds of one clock.

    Attributes:
        message_id: SQS's id.
        handle: the receipt handle that hid it.
        queue: the name of its queue.
        until: when SQS shows it again by itself.
        not_before: it must not run earlier.
        group: of a FIFO queue's message: queue and message group; else ``None``.
        next_is_last: its next receive is the last that its queue allows.
        is_behind: it was hidden because it stood behind the first of its group.
        receives: SQS's count of them, so far.
        probe_from: when it may be brought forward to probe with.
    """

    message_id: str
    handle: str
    queue: str
    until: float
    not_before: float = 0.0
    group: str | None = None
    next_is_last: bool = False
    is_behind: bool = False
    receives: int = 0
    probe_from: float = 0.0


def probe_from(delivery: Delivery, own_delay_ends: float) -> float:
    """From when a hidden message may be brought forward to probe with.

    A probe costs a receive: with few left, not before the message's own delay ends.
    """
    return 0.0 if delivery.has_receives_to_spare else own_delay_ends


class Memory:
    """The hidden messages of one provider, at most ``limit``. Not safe for threads by itself."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._hidden: dict[str, Hidden] = {}
        self._groups: dict[str, str] = {}
        #: By id, those behind the first of a group; by group, their ids in order.
        self._behind: dict[str, Hidden] = {}
        self._followers: dict[str, list[str]] = {}
        #: Sorted (until, id) of those that may be recalled, (not_before, id) of the others.
        self._ready: list[tuple[float, str]] = []
        self._early: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """How many are kept, also of those whose holds have ended."""
        return len(self._hidden) + len(self._behind)

    def count(self, now: float) -> int:
        """Return how many are hidden. Another worker has had those whose holds have ended."""
        self._drop_ended(now)
        self._drop_ended_behind(now)
        return len(self)

    def __iter__(self) -> Iterator[Hidden]:
        return chain(self._hidden.values(), self._behind.values())

    def has_room(self, now: float) -> bool:
        """Return whether one more can be kept and none forgotten for it."""
        if len(self._hidden) >= self._limit:
            self._drop_ended(now)
        return len(self._hidden) < self._limit

    def remember(self, hidden: Hidden, now: float) -> bool:
        """Keep a message; return whether it is kept. A newer hold replaces an older one.

        A full memory forgets the message that comes back soonest, which may be this one.
        """
        if hidden.is_behind and hidden.group is not None:
            return self._remember_behind(hidden, hidden.group, now)
        self.forget(hidden.message_id)
        if hidden.group is not None and hidden.group in self._groups:
            return False
        if not self.has_room(now):
            soonest = self._soonest()
            if soonest is None or soonest.until >= hidden.until:
                return False
            self.forget(soonest.message_id)
        self._hidden[hidden.message_id] = hidden
        if hidden.group is not None:
            self._groups[hidden.group] = hidden.message_id
        if hidden.not_before > now:
            insort(self._early, (hidden.not_before, hidden.message_id))
        else:
            insort(self._ready, (hidden.until, hidden.message_id))
        return True

    def forget(self, message_id: str) -> bool:
        """Drop a message: it was received again, settled, or its hold is in doubt."""
        hidden = self._hidden.pop(message_id, None)
        if hidden is None:
            return self._forget_behind(message_id)
        if hidden.group is not None:
            del self._groups[hidden.group]
            for follower in self._followers.pop(hidden.group, ()):
                del self._behind[follower]
        if not _remove(self._ready, (hidden.until, message_id)):
            _remove(self._early, (hidden.not_before, message_id))
        return True

    def take(self, most: int, now: float) -> list[Hidden]:
        """Take out up to ``most`` messages whose hold is certain; the furthest due first.

        Those behind the first of a group are taken with it, and not counted: they run after it.
        """
        self._drop_ended(now)
        taken: list[Hidden] = []
        for _ in range(most):
            if not self._ready or self._ready[-1][0] <= now + MARGIN_SECONDS:
                break
            taken += self._take_out(self._ready[-1][1], now)
        return taken

    def take_next(self, most: int, now: float) -> list[Hidden]:
        """Take out up to ``most`` to probe with, whose hold is certain; the least received first.

        A probe may fail, and costs a receive: few messages must not use up what their queue allows
        because many workers probe: see ``probe_from``. One whose next receive is its last
        serves only if there is no other.
        """
        self._drop_ended(now)
        hidden = self._hidden
        ids = [each for _, each in self._ready if hidden[each].probe_from <= now]
        ids.sort(key=lambda each: (hidden[each].next_is_last, hidden[each].receives))
        return [hidden for message_id in ids[:most] for hidden in self._take_out(message_id, now)]

    def take_all(self, now: float) -> list[Hidden]:
        """Take out all whose hold is certain, also before their time; the furthest due first."""
        self._drop_ended(now)
        ids = [hidden.message_id for hidden in self._hidden.values()]
        taken = [hidden for message_id in ids for hidden in self._take_out(message_id, now)]
        return sorted(taken, key=lambda hidden: -hidden.until)

    def waiting(self, now: float) -> int:
        """Return how many could be taken now."""
        first = bisect_right(self._ready, (now + MARGIN_SECONDS, "\U0010ffff"))
        return len(self._ready) - first + bisect_right(self._early, (now, "\U0010ffff"))

    @property
    def is_worth_waiting(self) -> bool:
        """Whether a message can be taken later, well before it would come back by itself."""
        return any(
            self._hidden[message_id].until > not_before + MARGIN_SECONDS
            for not_before, message_id in self._early
        )

    def _remember_behind(self, hidden: Hidden, group: str, now: float) -> bool:
        """Keep a message until the first of its group is taken, which may be confirmed later."""
        self._forget_behind(hidden.message_id)
        if len(self._behind) >= self._limit:
            self._drop_ended_behind(now)
        if len(self._behind) >= self._limit:
            return False
        self._behind[hidden.message_id] = hidden
        self._followers.setdefault(group, []).append(hidden.message_id)
        return True

    def _forget_behind(self, message_id: str) -> bool:
        hidden = self._behind.pop(message_id, None)
        if hidden is None or hidden.group is None:
            return False
        followers = self._followers[hidden.group]
        followers.remove(message_id)
        if not followers:
            del self._followers[hidden.group]
        return True

    def _take_out(self, message_id: str, now: float) -> list[Hidden]:
        """Take out a message, and those behind it whose hold is certain, in order."""
        hidden = self._hidden[message_id]
        behind = [self._behind[each] for each in self._followers.get(hidden.group or "", ())]
        self.forget(message_id)
        return [hidden, *(each for each in behind if each.until > now + MARGIN_SECONDS)]

    def _admit_early(self, now: float) -> None:
        """Move those whose ``not_before`` has come to those that may be recalled."""
        while self._early and self._early[0][0] <= now:
            _, message_id = self._early.pop(0)
            insort(self._ready, (self._hidden[message_id].until, message_id))

    def _drop_ended(self, now: float) -> None:
        self._admit_early(now)
        while self._ready and self._ready[0][0] <= now + MARGIN_SECONDS:
            self.forget(self._ready[0][1])
        while self._early:
            hidden = self._hidden[self._early[0][1]]
            if hidden.until > now + MARGIN_SECONDS:
                break
            self.forget(hidden.message_id)

    def _drop_ended_behind(self, now: float) -> None:
        for each in [each for each in self._behind.values() if each.until <= now]:
            self._forget_behind(each.message_id)

    def _soonest(self) -> Hidden | None:
        if self._ready:
            return self._hidden[self._ready[0][1]]
        return self._hidden[self._early[0][1]] if self._early else None


def _remove(entries: list[tuple[float, str]], entry: tuple[float, str]) -> bool:
    index = bisect_left(entries, entry)
    if index == len(entries) or entries[index] != entry:
        return False
    del entries[index]
    return True

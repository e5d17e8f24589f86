"""The calls by which a worker brings forward what it has hidden for providers that are back."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol

from ..observe.events import BroughtForward
from ..observe.stream import Events
from ..provider.gate import MARGIN_SECONDS, Hidden
from ..retry.policies import EqualJitter
from ..sqs.calls import Calls, Results
from ..sqs.limits import MAX_BATCH_ENTRIES
from .gate import Gate
from .reports import queue_name

__all__ = ["Recaller", "Taken"]

#: Between calls to bring messages forward that fail: each may leave its messages in doubt.
_AFTER_FAILURE: Final = EqualJitter(base=1, cap=10)


class Owner(Protocol):
    """What it needs of the worker's gates."""

    lock: Any  # a context manager
    rng: random.Random
    clock: Callable[[], float]
    events: Events

    def all(self) -> list[Gate]: ...


class Taken(NamedTuple):
    """A message that is about to be brought forward."""

    gate: Gate
    hidden: Hidden


class Recaller:
    """Takes messages out of their gates, and asks SQS to show them. For one thread.

    Arguments:
        owner: the gates.
        calls: from a queue's URL to its port.
        room: most messages that the worker has processes for now.
    """

    def __init__(
        self, owner: Owner, *, calls: Callable[[str], Calls], room: Callable[[], int]
    ) -> None:
        self._owner = owner
        self._calls = calls
        self._room = room
        #: Calls that failed, in a row; until when none is made.
        self._failures, self._away_until = 0, 0.0

    def recall(self) -> int:
        """Bring forward what is due; return how many messages SQS was asked for."""
        messages = 0
        for url, batch in self.recalls():
            handles = [each.hidden.handle for each in batch]
            results = self._calls(url).change_visibility([(handle, 0) for handle in handles])
            self.answered(batch, results)
            messages += len(batch)
        return messages

    def recalls(self) -> Iterator[tuple[str, list[Taken]]]:
        """Take out what is due now; yield each batch and its queue, for a call to SQS.

        While SQS fails there is one message now and then, and the others are kept. One that has
        waited behind slow calls is left out if its hold is about to end: another worker may have
        it when the call arrives. It comes back by itself.
        """
        if self._is_sqs_away():
            return
        by_queue: dict[str, list[Taken]] = defaultdict(list)
        room = self._room()
        with self._owner.lock:
            for gate in self._owner.all():
                for hidden in gate.recalls(room=room):
                    by_queue[hidden.queue].append(Taken(gate, hidden))
        for url, taken in by_queue.items():
            while taken:
                if self._is_sqs_away():
                    self._remember_again(taken)
                    break
                size = 1 if self._failures else MAX_BATCH_ENTRIES
                batch, taken = taken[:size], taken[size:]
                certain_until = self._owner.clock() + MARGIN_SECONDS
                if certain := [each for each in batch if each.hidden.until > certain_until]:
                    # Before the call: when SQS has answered, one may have been hidden again.
                    ids = tuple(each.hidden.message_id for each in certain)
                    self._owner.events.emit(BroughtForward(queue=queue_name(url), message_ids=ids))
                    yield url, certain

    def answered(self, batch: list[Taken], results: Results) -> None:
        """Note what SQS has answered for a batch.

        What it has certainly not done is remembered again. What is in doubt comes back by itself,
        now or when its hold ends: another worker may have it.
        """
        failed = [failure for failure in results if failure is not None and failure.is_transient]
        self._failures = self._failures + 1 if failed else 0
        if failed:
            self._away_until = self._owner.clock() + _AFTER_FAILURE.delay(
                self._failures, self._owner.rng
            )
        self._remember_again(
            each
            for each, failure in zip(batch, results, strict=True)
            if failure in failed and not failure.may_have_been_done
        )

    def _is_sqs_away(self) -> bool:
        return self._owner.clock() < self._away_until

    def _remember_again(self, batch: Iterable[Taken]) -> None:
        with self._owner.lock:
            for gate, hidden in batch:
                gate.core.was_hidden(hidden, self._owner.clock())

"""What is done with the messages of one receive: triage, archive, drop, send."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from .archive import Archive
from .delivery import Delivery
from .gate import Gate
from .ledger import Receipt
from .message import DeadLetter
from .queues import Endpoint
from .report import Ended
from .route import Route
from .settings import Settings
from .triage import EXPIRED, NOT_SELECTED, Action, Disposition, triage

__all__ = ["Handling"]

Chosen = list[tuple[DeadLetter, Disposition[Endpoint]]]


class Handling:
    """Called with what was received, from any thread.

    Arguments:
        delivery: of the run; its sweep, ledger and source are used.
        archive: gets each message before it is sent or dropped; ``None``: none.
        run_id: goes on the messages.
        clock: seconds; goes on while the machine sleeps. ``now``: seconds since the epoch.
    """

    def __init__(
        self,
        delivery: Delivery,
        route: Route,
        settings: Settings,
        gate: Gate,
        *,
        archive: Archive | None,
        run_id: str,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._delivery, self._sweep = delivery, delivery.sweep
        self._source, self._book = self._sweep.source, self._sweep.book
        self._halt = self._sweep.halt
        self._route, self._settings, self._gate = route, settings, gate
        self._archive, self._run_id = archive, run_id
        self._clock, self._now = clock, now

    def __call__(self, found: dict[Receipt, list[DeadLetter]]) -> None:
        delivery = self._delivery
        delivery.deletes.sent([(m.id, m.handle) for m in found.get(Receipt.SENT_BEFORE, [])])
        chosen = self._triaged(found.get(Receipt.NEW, []))
        room = self._book.admit(len(chosen), self._settings.limit)
        chosen, over = chosen[:room], chosen[room:]
        if over:
            self._sweep.give_back(self._book.release([m for m, _ in over], admitted=False))
        if self._archive is not None and chosen:
            try:
                self._archive.write(
                    [message for message, _ in chosen],
                    [str(d.destination.arn) if d.destination else None for _, d in chosen],
                )
            except OSError as exc:
                self._halt(Ended.FAILED, f"cannot write the archive: {exc.strerror}")
                return
        delivery.deletes.drop([m for m, d in chosen if d.action is Action.DROP])
        by_url: dict[str, list[DeadLetter]] = defaultdict(list)
        queues: dict[str, Endpoint] = {}
        for message, disposition in chosen:
            if disposition.action is Action.SEND and disposition.destination is not None:
                queues[disposition.destination.url] = disposition.destination
                by_url[disposition.destination.url].append(message)
        for url, group in by_url.items():
            delivery.send_all(queues[url], group)

    def _triaged(self, messages: Sequence[DeadLetter]) -> Chosen:
        """Leave aside what triage says; return the others."""
        chosen: Chosen = []
        left: Chosen = []
        now = self._now()
        for message in messages:
            disposition = triage(
                message,
                self._settings,
                self._route.destination,
                now,
                run_id=self._run_id,
                in_doubt=self._delivery.held_in_doubt(message, now),
                closed=self._delivery.closed,
            )
            disposition = self._in_order(message, disposition)
            is_chosen = disposition.action in (Action.SEND, Action.DROP)
            (chosen if is_chosen else left).append((message, disposition))
        if left and (returned := self._book.leave(left)):
            self._gate.returned(
                returned,
                sent=self._book.ledger.sent_in_run,
                now=self._clock(),
            )
        return chosen

    def _in_order(
        self, message: DeadLetter, disposition: Disposition[Endpoint]
    ) -> Disposition[Endpoint]:
        """FIFO: what comes after a message that stays waits for it, also in the same receive."""
        if not self._source.is_fifo:
            return disposition
        if disposition.action is Action.SEND and message.group_id in self._delivery.held_groups:
            return Disposition(Action.FAIL, "an earlier message of its group was left")
        is_meant = disposition.reason not in (NOT_SELECTED, EXPIRED)
        if is_meant and disposition.action in (
            Action.FAIL, Action.HOLD, Action.POISON, Action.SKIP,
        ):  # fmt: skip
            self._delivery.held_groups.add(message.group_id)
        return disposition

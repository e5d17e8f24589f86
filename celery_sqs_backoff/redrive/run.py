"""The engine: sweeps the source, and sends what triage says, at the rate that was asked for.

A message is deleted if, and only if, SQS has reported it as sent (or it was to be dropped).
Whatever else happens to it, it stays in the source. The run looks at as many messages as there
were at its start. What it has brought back itself takes no place.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from .archive import Archive
from .book import Book
from .clock import steady_seconds
from .delivery import Delivery
from .ending import finish, tell_end
from .events import Event, RateChanged, Started
from .gate import Gate
from .halt import Halt
from .handling import Handling
from .journal import NoJournal
from .pace import Pace
from .report import Ended, RedriveReport
from .route import Route
from .schedule import most_to_ask, threads_for, why_incomplete
from .settings import Settings
from .source import QueueSource
from .sweep import Holding, Sweep

__all__ = ["Run"]


class Run:
    """One run. Make one, call it once.

    Arguments:
        source: where the messages are.
        route: where they go.
        settings: what is asked for.
        journal: the log on disk.
        archive: gets each message before it is sent or dropped; ``None``: none.
        holding: for how long messages are hidden; so long a run that was killed may hide them.
        run_id: goes on the messages.
        on_event: is called with every event.
        stop: set from outside, ends the run as soon as what is under way has its answer.
        clock: seconds; goes on while the machine sleeps. ``now``: seconds since the epoch.
        sleep: between two tries of a call. ``rng``: for jitter.
    """

    def __init__(
        self,
        source: QueueSource,
        route: Route,
        settings: Settings,
        *,
        journal: NoJournal,
        archive: Archive | None,
        run_id: str,
        holding: Holding | None = None,
        on_event: Callable[[Event], None] | None = None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = steady_seconds,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._source, self._route, self._settings = source, route, settings
        self._archive, self._run_id = archive, run_id
        self._past, self._journal_path = journal.past, journal.path
        self._is_resumed = journal.past.is_resumed or not journal.past.is_settled
        self._clock, self._now, self._sleep = clock, now, sleep
        self._rng = rng or random.Random()
        self._halt = Halt(stop)
        self._book = Book(journal, on_event, clock)
        self._pace = Pace(settings.rate, ramp=settings.ramp)
        self._gate = Gate(
            self._pace,
            probe=settings.probe,
            changed=lambda factor, why: self._book.tell(RateChanged(factor, why)),
            stop=lambda why: self._halt(Ended.GATE, why),
        )
        holding = holding or Holding()
        is_sweep = not settings.selection.is_everything
        self._hold_seconds = holding.sweep_seconds if is_sweep else holding.seconds
        self._delivery: Delivery | None = None
        self._messages = 0  # in the source at the start

    def __call__(self) -> RedriveReport:
        """Run.

        Raises:
            RedriveUnreachable: SQS did not answer at the very start.
        """
        self._messages = self._source.depth().total
        if why := self._gate.why_closed():
            return self._tell_end(self._messages, Ended.GATE, f"not started: {why}")
        sweep = self._prepare_sweep()
        self._delivery = delivery = self._prepare_delivery(sweep)
        handle = Handling(
            delivery,
            self._route,
            self._settings,
            self._gate,
            archive=self._archive,
            run_id=self._run_id,
            clock=self._clock,
            now=self._now,
        )
        try:
            self._look_through(sweep, handle)
            delivery.deletes.try_once_more()
            self._say_if_incomplete()
            sweep.give_all_back()
            report = finish(
                self._book,
                self._halt,
                self._source,
                self._settings,
                delivery.destinations,
                messages=self._messages,
                now=self._now(),
            )
            self._book.tell.finish()
        except BaseException as exc:  # what is hidden comes back by itself
            remaining = max(0, self._messages - self._book.ledger.deleted)
            is_signal = isinstance(exc, KeyboardInterrupt)  # the second one
            why = "by a second signal" if is_signal else type(exc).__name__
            self._tell_end(remaining, Ended.INTERRUPTED, why)
            self._book.tell.finish(is_interrupted=True)
            raise
        finally:
            sweep.close()
        if self._halt.error is not None:
            raise self._halt.error
        return report

    def _prepare_sweep(self) -> Sweep:
        hidden_until = self._past.last_at + self._hold_seconds + 1
        patience = hidden_until - self._now() if self._is_resumed else 0
        return Sweep(
            self._source,
            self._book,
            self._halt,
            places=self._messages,
            hold_seconds=self._hold_seconds,
            patient_until=self._clock() + max(0.0, min(patience, self._hold_seconds + 1)),
            clock=self._clock,
            sleep=self._sleep,
            rng=self._rng,
        )

    def _prepare_delivery(self, sweep: Sweep) -> Delivery:
        return Delivery(
            sweep,
            self._settings,
            self._pace,
            run_id=self._run_id,
            default=self._route.default,
            clock=self._clock,
            now=self._now,
            sleep=self._sleep,
            rng=self._rng,
        )

    def _look_through(self, sweep: Sweep, handle: Handling) -> None:
        self._book.name_past_in_doubt(resend=self._settings.include_unknown)
        default = self._route.default
        threads = threads_for(
            self._settings,
            self._messages,
            is_fifo=self._source.is_fifo or bool(default and default.is_fifo),
        )
        path = str(self._journal_path) if self._journal_path else None
        self._book.tell(
            Started(
                self._run_id, self._source.name, self._messages, threads, self._is_resumed, path
            )
        )
        self._book.tell.start()
        keeper = sweep.keep(self._every_second)
        try:
            self._sweep(sweep, threads, handle)
        except Exception as exc:  # noqa: BLE001  # it is raised when all has been given back
            self._halt.fail(exc)
        finally:
            self._halt.finish()
            keeper.join()

    def _say_if_incomplete(self) -> None:
        if self._halt.ended is not Ended.DONE:
            return
        limit = self._settings.limit
        if why := why_incomplete(self._book, self._source, self._messages, limit):
            self._halt(Ended.INCOMPLETE, why)

    def _sweep(self, sweep: Sweep, threads: int, handle: Handling) -> None:
        sweep.run(
            threads,
            handle,
            most=lambda: most_to_ask(self._book, self._pace, self._settings, self._clock()),
            limit=self._settings.limit,
        )

    def _every_second(self) -> None:
        self._gate.watch(self._clock())
        self._book.tell_progress(self._messages, self._settings.limit)

    def _tell_end(self, remaining: int, ended: Ended, detail: str) -> RedriveReport:
        return tell_end(
            self._book,
            self._source,
            self._settings,
            self._delivery.destinations if self._delivery else [],
            remaining=remaining,
            ended=ended,
            detail=detail,
        )

"""End a redrive, and pause it between two tries of a call."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..retry.policies import FullJitter
from ..threads import steady_seconds
from .errors import RedriveError, RedriveUnreachable
from .events import Ended, Finished, RedriveReport

if TYPE_CHECKING:
    from .ledger import Ledger

TRIES = 6
_BETWEEN_TRIES = FullJitter(base=0.2, cap=5)
_RNG = random.Random()


def draw_pause(attempt: int) -> float:
    """Return a random number of seconds to wait after a failed try of a call, at most 5.

    ``attempt``: number of the failed try, from 1.
    """
    return _BETWEEN_TRIES.delay(attempt, _RNG)


class Halt:
    """The stop flag of a run, with the reason, and the run's clocks. Safe for threads.

    Call the object with a reason to end the run. It keeps the first reason.

    Arguments:
        stop: the caller of the redrive sets it to end the run.
        clock: returns monotonic seconds. It also runs while the machine is suspended.
        now: returns seconds since the epoch.
    """

    def __init__(
        self,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = steady_seconds,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.clock, self.now = clock, now
        self._stop = stop or threading.Event()
        self._event = threading.Event()
        self._lock = threading.Lock()
        self.ended, self.detail = Ended.DONE, ""
        self.error: BaseException | None = None

    def __call__(self, ended: Ended, detail: str = "") -> None:
        with self._lock:
            if self.ended is Ended.DONE:
                self.ended, self.detail = ended, detail
            self._event.set()

    def fail(self, exc: BaseException) -> None:
        """End the run because of an exception. At its end, the run raises the exception."""
        with self._lock:
            self.error = self.error or exc
        ended = Ended.UNREACHABLE if isinstance(exc, RedriveUnreachable) else Ended.ERROR
        self(ended, str(exc) if isinstance(exc, RedriveError) else type(exc).__name__)

    def finish(self) -> None:
        """Set the flag without a reason, because the work is done. Wake all waiting threads."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether the run must end. A read also ends the run if the caller has set ``stop``."""
        if self._stop.is_set() and not self._event.is_set():
            self(Ended.INTERRUPTED, "stopped by the caller")
        return self._event.is_set()

    def pause(self, attempt: int) -> None:
        """Wait between two tries of a call. The end of the run does not shorten the wait."""
        time.sleep(draw_pause(attempt))

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end of the run. Return whether the run must end.

        The caller's ``stop`` does not shorten the wait.
        """
        return self._event.wait(seconds) or self.is_set


def must_end(ledger: Ledger, halt: Halt) -> bool:
    """End the run if ``on_event`` or the journal has failed. Return whether the run must end."""
    if (error := ledger.emit.error) is not None:
        halt.fail(error)
    if (unwritten := ledger.file_error) is not None:
        halt(Ended.FAILED, f"cannot write the journal: {unwritten.strerror or unwritten}")
    return halt.is_set


def carry_out(
    work: Callable[[], int], ledger: Ledger, halt: Halt, *, estimate: Callable[[], int]
) -> RedriveReport:
    """Do the work of a run, and emit ``Finished`` even if the work raises an exception.

    Arguments:
        work: returns how many messages remain in the source.
        estimate: returns about how many messages remain. It is called if ``work`` raises.
    """

    def report_end(remaining: int) -> RedriveReport:
        ledger.name_undeleted()
        ended, detail = halt.ended, halt.detail
        report = RedriveReport(**ledger.numbers(), remaining=remaining, ended=ended, detail=detail)
        ledger.emit(Finished(report, ended.value, detail))
        return report

    try:
        report = report_end(work())
    except BaseException as exc:
        # End without further calls. SQS shows the received messages again when their visibility
        # timeouts end. In the command ``celery sqs-redrive``, the first signal only sets ``stop``,
        # so a KeyboardInterrupt comes from the second signal.
        if isinstance(exc, Exception):
            halt.fail(exc)
        else:
            is_signal = isinstance(exc, KeyboardInterrupt)
            halt.ended = Ended.INTERRUPTED
            halt.detail = "by a second signal" if is_signal else type(exc).__name__
        ledger.name_unanswered()
        report_end(estimate())
        ledger.emit.finish(is_interrupted=True)
        raise
    ledger.emit.finish()
    # ``on_event`` may have raised for one of the last events.
    if (error := halt.error or ledger.emit.error) is not None:
        raise error
    return report

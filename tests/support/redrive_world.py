"""Run redrives in virtual time on the strict fake SQS, and kill them at a chosen step.

The engine is the real one, and its journal is a real file. Only its threads are replaced, by
greenlets. One greenlet runs at a time. It lets another one run at each call to SQS, each write of
the journal and each wait. The seed decides which one, so a test can repeat a history.

A step is a call to SQS or a write of the journal. Between two steps, a process changes nothing that
outlives it. So a kill is simulated by an exception before or after a step, and in each later step.
Code of the engine that catches the exception cannot change anything any more.
"""

from __future__ import annotations

import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from greenlet import getcurrent, greenlet

from celery_sqs_backoff.redrive import files, halt, queues, sender, sweep
from celery_sqs_backoff.redrive.events import Listener, RedriveReport, Started
from celery_sqs_backoff.redrive.files import Journal, NoJournal
from celery_sqs_backoff.redrive.halt import draw_pause
from celery_sqs_backoff.redrive.look import Plan, look_through
from celery_sqs_backoff.redrive.options import RedriveOptions
from celery_sqs_backoff.redrive.queues import Endpoint, Route
from celery_sqs_backoff.redrive.restore import Restore, check_archive
from celery_sqs_backoff.redrive.run import RedriveRun
from celery_sqs_backoff.redrive.sweep import Sweep
from celery_sqs_backoff.sqs.arns import QueueArn
from celery_sqs_backoff.sqs.calls import Calls

from .fake_sqs import Clock, FakeSQS


class Killed(BaseException):
    """The process of the redrive was killed."""


class World:
    """A queue with a dead-letter queue, and redrives of it, one after the other.

    Arguments:
        directory: the directory for the journal.
        seed: decides about jitter and the turns of greenlets.
        latency: how many virtual seconds a call takes.
        threads: the most greenlets to use. None means as many as the engine wants.
    """

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        latency: float = 0.0,
        fifo: bool = False,
        threads: int | None = 1,
    ) -> None:
        self.clock = Clock()
        self.sqs = FakeSQS(self.clock)
        self.rng = random.Random(seed)
        self.latency = latency
        self.most_threads = threads
        self.turns = _Turns(self.clock, self.rng)
        end = ".fifo" if fifo else ""
        options = {"FifoQueue": "true"} if fifo else {}
        for name in ("mail-dlq", "mail"):
            self.sqs.create_queue(QueueName=f"{name}{end}", Attributes=options)
        self.journal_path = directory / "journal"
        self.events: list[Any] = []
        self.calls: Counter[str] = Counter()
        self.on_event: Callable[[Any], None] = lambda event: None
        #: The number of the step at which the process dies, and whether it first does the step.
        self.dies_at: tuple[int, bool] | None = None
        self.steps = 0
        #: Called before each step. A test can let other programs act here.
        self.before_step: Callable[[], None] = lambda: None
        #: Returns whether the disk is too full to write the journal.
        self.is_disk_full: Callable[[], bool] = lambda: False
        #: A test sets this as if the process had got a signal. Each run clears it first.
        self.stop = threading.Event()
        self.source = self._endpoint(f"mail-dlq{end}")
        self.main = self._endpoint(f"mail{end}")
        self.run: RedriveRun | None = None

    # For tests

    def fill(self, *bodies: str, **message: Any) -> list[str]:
        """Put messages on the dead-letter queue, and return their IDs."""
        entry = {"QueueUrl": self.source.url, "MessageAttributes": {}, **message}
        return [self.sqs.send_message(MessageBody=body, **entry)["MessageId"] for body in bodies]

    def arrive(self, number: int) -> None:
        """Let new messages arrive when a run has started. The run receives them first."""

        def on_event(event: Any) -> None:
            if isinstance(event, Started):
                self.fill(*(f"new {n}" for n in range(number)))
                self.sqs.queues[self.source.url].messages.reverse()

        self.on_event = on_event

    def bodies(self, endpoint: Endpoint) -> Counter[str]:
        return Counter(message.body for message in self.sqs.queues[endpoint.url].messages)

    def redrive(
        self,
        *,
        journal: bool = True,
        hold_seconds: int | None = None,
        to: Any = None,
        **options: Any,
    ) -> RedriveReport:
        """Redrive the dead-letter queue in virtual time.

        Raises:
            Killed: the process was killed at a step.
        """
        self.steps = 0
        self.stop.clear()
        kept: NoJournal = NoJournal()
        with ExitStack() as stack:
            if journal:
                stack.enter_context(mock.patch.object(files.os, "fsync"))
                written = _Journal(self, self.journal_path, str(self.source.arn))
                kept = stack.enter_context(written)
            stack.enter_context(self._without_threads())
            self.run = RedriveRun(
                Route(self.source, (self.main,), to),
                RedriveOptions(**options),
                journal=kept,
                archive=None,
                hold_seconds=hold_seconds,
                on_event=self._note,
                stop=self.stop,
                clock=self.clock,
                now=self.clock,
            )
            return self.run()

    def look(self, *, copy: Any = None, sample: int | None = None, **options: Any) -> Plan:
        """Look through the dead-letter queue as a dry run does, in virtual time."""
        route = Route(self.source, (self.main,))
        with self._without_threads():
            return look_through(
                route,
                RedriveOptions(**options),
                sample,
                copy=copy and copy.write,
                now=self.clock,
                clock=self.clock,
            )

    def restore(self, archive: Path, **options: Any) -> RedriveReport:
        """Put an archive back on the dead-letter queue, in virtual time."""
        self.steps = 0
        key = f"restore to {self.source.arn}"
        with (
            mock.patch.object(files.os, "fsync"),
            _Journal(self, archive.with_suffix(".restored"), key) as journal,
            self._without_threads(),
        ):
            return Restore(
                Route(self.source, (self.main,)),
                RedriveOptions(**options),
                archive=archive,
                messages=check_archive(archive, str(self.source.arn)),
                journal=journal,
                on_event=self._note,
                stop=self.stop,
                clock=self.clock,
                now=self.clock,
            )()

    def sleep(self, seconds: float) -> None:
        self.turns.wait(max(0.001, seconds))

    @contextmanager
    def _without_threads(self) -> Iterator[None]:
        locks = SimpleNamespace(Lock=lambda: _Lock(self.turns))
        with (
            mock.patch.object(Sweep, "run", lambda *a, **k: self._sweep(*a, **k)),
            mock.patch.object(Sweep, "keep", return_value=mock.Mock()),
            mock.patch.object(Listener, "start"),
            mock.patch.object(sweep, "ThreadPoolExecutor", _Inline),
            mock.patch.object(halt.Halt, "wait", lambda *a: self._wait(*a)),
            mock.patch.object(halt.Halt, "pause", lambda _, n: self.sleep(draw_pause(n))),
            mock.patch.object(halt, "_RNG", self.rng),
            mock.patch.object(sender, "random", self.rng),
            mock.patch.object(sender, "threading", locks),
            mock.patch.object(queues, "sleep", self.sleep),
        ):
            yield

    @property
    def is_main_thread(self) -> bool:
        """Whether the caller is the engine's main thread, not a greenlet."""
        return getcurrent().parent is None

    def step(self, do: Callable[[], Any]) -> Any:
        """Do a step, unless the process dies at it."""
        self.steps += 1
        self.before_step()
        if self.dies_at is not None:
            at, after = self.dies_at
            if self.steps == at and after:
                do()
            if self.steps >= at:
                raise Killed
        return do()

    # Helpers

    def _endpoint(self, name: str) -> Endpoint:
        url = f"https://sqs.example/1/{name}"
        arn = QueueArn.parse(self.sqs.queues[url].arn)
        calls = Calls(lambda: _Client(self), url)
        return Endpoint(arn, calls, {"MessageRetentionPeriod": "345600"})

    def _note(self, event: Any) -> None:
        self.events.append(event)
        self.on_event(event)

    def _wait(self, halt: Any, seconds: float = 0.0) -> bool:
        if not halt.is_set:
            self.sleep(seconds)
        return bool(halt.is_set)

    def _sweep(self, sweep: Sweep, threads: int) -> None:
        """Run the engine's threads as greenlets, with one more that renews visibility timeouts."""
        threads = min(threads, self.most_threads or threads)

        def keep() -> None:
            try:
                while self.turns.others and not sweep.halt.is_set:
                    self.turns.wait(1.0)
                    sweep.renew()
            except BaseException as exc:  # noqa: BLE001  # the engine's own keeper does the same
                sweep.halt.fail(exc)

        self.turns.run([sweep.work] * threads, keep)


class _Client:
    """A client of the fake SQS. Each call is a step, and takes virtual time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        world = self._world
        method = getattr(world.sqs, name)

        def call(**request: Any) -> Any:
            world.calls[name] += 1
            world.turns.wait(world.latency / 2)
            answer = world.step(lambda: method(**request))
            world.turns.wait(world.latency / 2)
            if name == "receive_message" and not answer.get("Messages"):
                world.turns.wait(request.get("WaitTimeSeconds", 0))
            return answer

        return call


class _Journal(Journal):
    def __init__(self, world: World, path: Path, source: str) -> None:
        self._world = world
        super().__init__(path, source=source)

    def write(self, kind: str, ids: Sequence[str], at: float = 0.0) -> None:
        super_write = super().write
        self._world.turns.wait(0)
        if self._world.is_disk_full():
            raise OSError(errno.ENOSPC, "No space left on device")
        self._world.step(lambda: super_write(kind, ids, at))


class _Turns:
    """Runs greenlets in place of threads.

    A greenlet that waits lets another one run. The clock moves when all of them wait.

    Arguments:
        rng: decides which greenlet runs next.
    """

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self._wake: dict[greenlet, float] = {}
        self._keeper: greenlet | None = None

    @property
    def others(self) -> bool:
        """Whether a greenlet other than the keeper has not ended.

        The keeper renews visibility timeouts.
        """
        return any(g is not self._keeper for g in self._wake)

    def run(self, functions: Sequence[Callable[[], None]], keeper: Callable[[], None]) -> None:
        """Run the functions and the keeper as greenlets until all of them have ended."""
        self._keeper = greenlet(keeper)
        self._wake = dict.fromkeys([*map(greenlet, functions), self._keeper], self._clock.now)
        while self._wake:
            ready = [g for g, at in self._wake.items() if at <= self._clock.now]
            if not ready:
                self._clock.now = min(self._wake.values())
                continue
            chosen = self._rng.choice(ready)
            chosen.switch()
            if chosen.dead:
                del self._wake[chosen]

    def wait(self, seconds: float) -> None:
        current = getcurrent()
        if current in self._wake:
            self._wake[current] = self._clock.now + seconds
            current.parent.switch()
        else:
            self._clock.now += seconds


class _Lock:
    """A lock between greenlets."""

    def __init__(self, turns: _Turns) -> None:
        self._turns, self._is_taken = turns, False

    def __enter__(self) -> None:
        while self._is_taken:
            self._turns.wait(0.001)
        self._is_taken = True

    def __exit__(self, *exc: object) -> None:
        self._is_taken = False


class _Inline:
    """A thread pool that calls functions at once, without threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        return [function(item) for item in items]

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None: ...

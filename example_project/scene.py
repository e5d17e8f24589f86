"""One run of the demo: a worker sends mails while its mail provider is down, and afterwards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .processes import Program, Programs
from .provider import Behaviour, Mode
from .services import SQS, Counts, MailProvider


@dataclass(frozen=True)
class Plan:
    """What happens in a run."""

    mails: int = 2000
    #: The length of the outage, counted from the first call that reaches the provider.
    outage_seconds: float = 30.0
    #: The capacity of the provider when it is back. It answers 429 to calls above it.
    calls_per_second: int = 60
    #: The number of mails that become dead letters at the end, for the redrive.
    refused_mails: int = 20


@dataclass(frozen=True)
class Snapshot:
    """The figures of a run at one moment."""

    seconds_of_outage_left: float  # 0 if the provider is up
    queue: Counts
    calls: int
    sent: int
    calls_per_second: float


@dataclass(frozen=True)
class Result:
    """The figures of a run. Times are seconds since the first call."""

    policy: str
    mails: int
    duplicates: int
    lost: int
    dead: int
    recovered_at: float
    calls: list[tuple[float, int]] = field(repr=False)  # time and status of each call
    calls_per_second: int = 60

    @property
    def is_clean(self) -> bool:
        return self.lost == self.duplicates == self.dead == 0

    @property
    def wasted(self) -> int:
        """The number of calls while the provider was down."""
        return sum(status == 503 for _, status in self.calls)

    @property
    def shortest_seconds(self) -> float:
        """The shortest time in which the provider takes all mails."""
        return self.mails / self.calls_per_second

    @property
    def throttled(self) -> int:
        """The number of calls that were answered with 429."""
        return sum(status == 429 for _, status in self.calls)

    @property
    def peak_calls_per_second(self) -> int:
        """The number of calls in the busiest second after the recovery."""
        return busiest_second(when for when, _ in self.calls if when >= self.recovered_at)

    @property
    def seconds_to_last_mail(self) -> float:
        """The time from the recovery until the last mail was sent."""
        sent = [when for when, status in self.calls if status == 200]
        return max(sent, default=self.recovered_at) - self.recovered_at

    def summary(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "mails": self.mails,
            "calls": len(self.calls),
            "wasted": self.wasted,
            "throttled": self.throttled,
            "duplicates": self.duplicates,
            "lost": self.lost,
            "dead": self.dead,
            "peak_calls_per_second": self.peak_calls_per_second,
            "seconds_to_last_mail": round(self.seconds_to_last_mail, 1),
            "shortest_seconds": round(self.shortest_seconds, 1),
        }


@dataclass(frozen=True)
class Replay:
    """The figures of the redrive at the end of the demo."""

    #: The number of dead letters before the redrive, and after it.
    dead: int
    left: int
    #: How many mails the provider has then sent, and how many of them twice.
    sent: int
    duplicates: int

    @property
    def is_clean(self) -> bool:
        return self.dead == self.sent and self.left == self.duplicates == 0


class Scene:
    """A queue, a mail provider that is down, and a worker that follows one backoff policy."""

    def __init__(
        self,
        policy: str,
        plan: Plan,
        sqs: SQS,
        provider: MailProvider,
        database: Path,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.policy = policy
        self._plan = plan
        self._sqs = sqs
        self._clock = clock
        self._queue = sqs.create_queue(f"mails-{policy}")
        self._provider = provider
        self._provider.behave(Behaviour(Mode.DOWN))
        self._env = {
            "BROKER_URL": sqs.broker_url,
            "MAILS_QUEUE_URL": self._queue.url,
            "MAIL_PROVIDER_URL": self._provider.url,
            "MAILS_PROVIDER": "yes" if policy == "provider" else "no",
            "DATABASE": str(database),
        }
        self._recovered_at: float | None = None
        self._looks: deque[tuple[float, int]] = deque(maxlen=3)  # times, and calls until then
        self._is_empty = self.is_over = False

    def queue_mails(self, programs: Programs) -> Program:
        arguments = ("example_project.manage", "send_mails", str(self._plan.mails))
        return programs.start(f"send-{self.policy}", *arguments, env=self._env)

    def start_worker(self, programs: Programs, *, name: str = "") -> Program:
        """Start a worker with two processes. Each of several workers needs its own name."""
        name = name or f"worker-{self.policy}"
        app = "example_project.stock" if self.policy == "autoretry" else "example_project"
        arguments = ("celery", "-A", app, "worker", "-c", "2", "-l", "WARNING")
        return programs.start(name, *arguments, "-n", f"{name}@%h", env=self._env)

    def look(self) -> Snapshot:
        """Return the figures of this moment. When the time of the outage is over, end it."""
        now, report, queue = self._clock(), self._provider.report(), self._sqs.counts(self._queue)
        left = self._plan.outage_seconds
        if report["first_call_at"] is not None:
            left = max(0.0, report["first_call_at"] + left - now)
        if left == 0 and self._recovered_at is None:
            self._provider.behave(Behaviour(calls_per_second=self._plan.calls_per_second))
            self._recovered_at = self._clock()
        # The queue must look empty twice in a row, because SQS's counts are approximate.
        is_empty = queue.visible == queue.hidden == 0
        self.is_over = self._recovered_at is not None and is_empty and self._is_empty
        self._is_empty = is_empty
        self._looks.append((now, report["calls"]))
        return Snapshot(left, queue, report["calls"], report["mails"], self._rate())

    def result(self) -> Result:
        report, calls = self._provider.report(), self._provider.calls()
        dead = self._sqs.dead_mails(self._queue)
        first = report["first_call_at"]
        assert self._recovered_at is not None, "the run is over"
        return Result(
            policy=self.policy,
            mails=self._plan.mails,
            duplicates=report["duplicates"],
            # Count by ID, because a mail may be sent and also be a dead letter. This happens if the
            # worker did not learn that the mail was sent.
            lost=self._plan.mails - len(self._provider.sent() | dead),
            dead=len(dead),
            recovered_at=self._recovered_at - first,
            calls=[(when - first, status) for when, status in calls],
            calls_per_second=self._plan.calls_per_second,
        )

    def make_dead_letters(self, programs: Programs, mails: int) -> tuple[str, str]:
        """Send mails while the provider refuses the API key, so that they become dead letters.

        Return the command line that shows the dead letters, and its output.
        """
        self._provider.behave(Behaviour(Mode.UNAUTHORIZED))
        send = ("example_project.manage", "send_mails", str(mails))
        programs.finish(programs.start("send-refused", *send, env=self._env))
        programs.wait_for(
            lambda: self._dead() >= mails, "all refused mails are dead letters", timeout=60
        )
        return self._type(programs, "sqs-peek", "mails")

    def redrive(self, programs: Programs) -> tuple[Replay, str, str]:
        """Repair the API key, and redrive the dead letters.

        Return the figures, the command line and its output.
        """
        dead, before = self._dead(), self._provider.report()
        self._provider.behave(Behaviour(calls_per_second=self._plan.calls_per_second))
        line, output = self._type(programs, "sqs-redrive", "mails", "--rate", "10/s", "--yes")
        all_mails = before["mails"] + dead
        programs.wait_for(
            lambda: self._provider.report()["mails"] >= all_mails,
            "the redriven mails are sent",
            timeout=60,
        )
        after = self._provider.report()
        sent, duplicates = (after[name] - before[name] for name in ("mails", "duplicates"))
        return Replay(dead, self._dead(), sent, duplicates), line, output

    def _type(self, programs: Programs, command: str, *arguments: str) -> tuple[str, str]:
        """Run a command of the package. Return its command line and its output."""
        words = ("celery", "-A", "example_project", command, *arguments)
        journal = {"XDG_STATE_HOME": str(Path(self._env["DATABASE"]).parent)}
        program = programs.start(command, *words, env=self._env | journal)
        programs.finish(program)
        return " ".join(words), program.output()

    def _dead(self) -> int:
        return self._sqs.counts(self._queue).dead

    def _rate(self) -> float:
        (then, calls_then), (now, calls_now) = self._looks[0], self._looks[-1]
        return (calls_now - calls_then) / (now - then) if now > then else 0.0


def busiest_second(times: Iterable[float]) -> int:
    """Return the largest number of events within a second."""
    window: deque[float] = deque()
    busiest = 0
    for time_ in sorted(times):
        window.append(time_)
        while window[0] <= time_ - 1:
            window.popleft()
        busiest = max(busiest, len(window))
    return busiest

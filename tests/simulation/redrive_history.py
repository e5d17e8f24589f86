"""Random histories of a redrive: faults, kills between any two steps, time that passes, bounces.

``python -m tests.simulation.redrive_history --seed 0 --histories 2000`` runs many; each is
repeatable from its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

from celery_sqs_backoff.redrive import Ended, RedriveError, RedriveReport
from celery_sqs_backoff.redrive.events import InDoubt, Sent
from celery_sqs_backoff.redrive.ledger import State
from celery_sqs_backoff.redrive.sweep import Holding
from tests.support.fake_sqs import Fault
from tests.support.redrive_world import Killed, World

__all__ = ["first_failure", "history"]

ACTIONS = (
    "SendMessageBatch",
    "DeleteMessageBatch",
    "ReceiveMessage",
    "ChangeMessageVisibilityBatch",
)
ERRORS = (
    "InternalError",
    "Throttling",
    ReadTimeoutError(endpoint_url="x"),
    ConnectTimeoutError(endpoint_url="x"),
)


def faults(rng: random.Random) -> list[Fault]:
    found = []
    for _ in range(rng.choice((0, 0, 1, 3, 8))):
        action = rng.choice(ACTIONS)
        error = rng.choice(ERRORS)
        if rng.random() < 0.3 and action != "ReceiveMessage":
            some = frozenset(rng.sample(range(10), rng.randint(1, 3)))
            found.append(Fault(action, rng.choice(("InternalError", "Throttling")), entries=some))
        else:
            lost = isinstance(error, ReadTimeoutError) and rng.random() < 0.7
            found.append(Fault(action, error, after=lost))
    if rng.random() < 0.1:  # the first send arrives, and SQS says so of none of its repetitions
        lost = Fault("SendMessageBatch", ReadTimeoutError(endpoint_url="x"), after=True)
        found = [lost, *[Fault("SendMessageBatch", "Throttling")] * 12]
    if rng.random() < 0.2:  # nothing can be renewed
        found += [Fault("ChangeMessageVisibilityBatch", "InternalError")] * 200
    return found


class History:
    """One history, drawn from its seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        latency = rng.choice((0.0, 0.02, 1.0))
        self.world = world = World(directory, seed=seed, latency=latency, threads=None)
        self.bodies = [f"m{n}" for n in range(rng.choice((1, 7, 23, 40)))]
        ids = world.fill(*self.bodies)
        self.body_of = dict(zip(ids, self.bodies, strict=True))
        self.bounced: set[str] = set()
        self.may_bounce = rng.choice((0, 0, 0, 3))
        self.shows_twice = rng.choice((0.0, 0.0, 0.1))
        self.has_rival = not (self.shows_twice or self.may_bounce) and rng.random() < 0.5
        world.on_event, world.before_step = self.on_event, self.before_step
        self.options: dict[str, Any] = {"max_replays": 1_000}
        self.options["holding"] = rng.choice((None, None, Holding(5, 5)))
        if rng.random() < 0.4:
            self.options["rate"] = rng.choice(("2/s", "50/s", "10/m"))

    def on_event(self, event: object) -> None:
        self.check_the_sum()
        if isinstance(event, Sent) and len(self.bounced) < self.may_bounce:
            self.bounce()
        if self.rng.random() < self.shows_twice:  # SQS may show a message that is in flight
            in_flight = self.world.sqs.queues[self.world.source.url].in_flight()
            if in_flight:
                self.rng.choice(in_flight).visible_at = self.world.clock.now

    def before_step(self) -> None:
        if self.has_rival and self.rng.random() < 0.5:
            self.take_what_is_visible()

    def take_what_is_visible(self) -> None:
        """Somebody else redrives, too: what this run does not hold any more is theirs."""
        source = self.world.sqs.queues[self.world.source.url]
        main = self.world.bodies(self.world.main)
        visible = [m for m in source.messages if m.visible_at <= self.world.clock.now]
        for message in visible:
            if message.receives and message.body not in main:
                source.messages.remove(message)
                self.world.sqs.send_message(
                    QueueUrl=self.world.main.url, MessageBody=message.body, MessageAttributes={}
                )

    def bounce(self) -> None:
        """A worker takes a message that was sent, and gives it up."""
        sqs, main = self.world.sqs, self.world.sqs.queues[self.world.main.url]
        if not main.messages:
            return
        message = self.rng.choice(main.messages)
        main.messages.remove(message)
        sent = sqs.send_message(
            QueueUrl=self.world.source.url,
            MessageBody=message.body,
            MessageAttributes=message.attributes,
        )
        self.body_of[sent["MessageId"]] = message.body
        self.bounced.add(message.body)

    def check_the_sum(self) -> None:
        """Each message is in one state, and every number is a fold over the ledger."""
        assert self.world.run is not None
        ledger = self.world.run._book.ledger
        live = Counter(row.state for row in ledger.rows.values())
        assert sum(ledger.counts.values()) == ledger.looked_at
        assert all(ledger.counts[s] == live[s] for s in State if s is not State.DELETED)
        assert ledger.counts[State.DELETED] == ledger.deleted
        left = Counter(row.left for row in ledger.rows.values() if row.state is State.ASIDE)
        assert +ledger.left == left

    def redrive(self, in_doubt: str = "resend") -> RedriveReport:
        """A run that says that it is done has left only what it counts, and what came back."""
        source = self.world.sqs.queues[self.world.source.url]
        before = {message.id for message in source.messages}
        copies, bounced = self.world.bodies(self.world.main), len(self.bounced)
        try:
            report = self.world.redrive(**self.options, in_doubt=in_doubt)
        finally:
            if in_doubt == "hold" and not self.has_rival:
                now = self.world.bodies(self.world.main)
                assert all(
                    n <= max(1, copies[body]) or body in self.bounced for body, n in now.items()
                ), "sent again, though held"
        if report.ended is Ended.DONE and bounced == len(self.bounced):  # those can take a place
            counted = report.failed + report.skipped + report.poison + report.not_deleted
            counted += report.in_doubt if in_doubt == "hold" else 0
            left = [message for message in source.messages if message.id in before]
            assert len(left) <= counted, "done, and messages are left"
        return report

    def run(self) -> None:
        rng, world = self.rng, self.world
        holds = rng.choice((0.0, 0.0, 0.5, 1.0))
        for _ in range(rng.randint(0, 4)):
            world.sqs.faults += faults(rng)
            world.dies_at = (rng.randint(1, 60), rng.random() < 0.5) if rng.random() < 0.8 else None
            with suppress(Killed, RedriveError):
                self.redrive("hold" if rng.random() < holds else "resend")
            world.sqs.faults.clear()
            world.clock.now += rng.choice((0, 5, 40, 400))
        world.dies_at, self.may_bounce = None, 0
        world.sqs.faults += faults(rng)
        report = None
        for _ in range(6):
            with suppress(RedriveError):
                report = self.redrive()
            world.sqs.faults.clear()
            world.clock.now += 400
            if not world.bodies(world.source) and report is not None:
                break
        self.judge(report)

    def judge(self, report: RedriveReport | None) -> None:
        world, body_of = self.world, self.body_of
        named = {body_of[i] for e in world.events if isinstance(e, InDoubt) for i in e.ids}
        copies = world.bodies(world.main)
        assert set(copies) == set(self.bodies), "a message is lost, or left"
        twice = {body for body, count in copies.items() if count > 1}
        assert twice <= named, f"sent twice and not named: {twice - named}"
        told = Counter(id_ for e in world.events if isinstance(e, Sent) for id_ in e.ids)
        assert max(told.values(), default=1) == 1, "what was noted as sent is never sent again"
        assert not world.bodies(world.source)
        assert report is not None
        assert report.remaining == 0 or self.has_rival
        assert world.journal_path.read_text().endswith('{"is":"ended"}\n')


def history(seed: int, directory: Path) -> None:
    """Run one. Raises AssertionError, or whatever the engine raises, if something is wrong."""
    History(seed, directory).run()


def first_failure(seeds: range) -> tuple[int, Exception] | None:
    """Return the first seed with which something is wrong, and what."""
    with TemporaryDirectory() as directory:
        for seed in seeds:
            try:
                Path(directory, str(seed)).mkdir()
                history(seed, Path(directory, str(seed)))
            except Exception as exc:  # noqa: BLE001  # whatever it is, it is wrong
                return seed, exc
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate redrives with faults and kills.")
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--histories", type=int, default=2_000)
    options = parser.parse_args()
    failure = first_failure(range(options.seed, options.seed + options.histories))
    if failure is None:
        print(f"{options.histories} histories from seed {options.seed}: nothing is wrong")
        return 0
    print(f"seed {failure[0]}: {type(failure[1]).__name__}: {failure[1]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())

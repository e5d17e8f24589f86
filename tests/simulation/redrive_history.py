"""Run random histories of redrives with faults and kills, and check that no message is lost.

``python -m tests.simulation.redrive_history --seed 0 --histories 2000`` runs many histories. The
same seed always gives the same history.
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
from celery_sqs_backoff.redrive.events import Finished, InDoubt, MessagesSent, NotDeleted
from celery_sqs_backoff.redrive.halt import TRIES
from celery_sqs_backoff.redrive.ledger import RowState
from celery_sqs_backoff.redrive.triage import Action
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
    "ExpiredToken",
    None,  # an empty response
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
            may_be_lost = error is None or isinstance(error, ReadTimeoutError)
            lost = may_be_lost and rng.random() < 0.7
            found.append(Fault(action, error, after=lost))
    # The first send arrives and its response gets lost. SQS then throttles all repetitions.
    if rng.random() < 0.1:
        lost = Fault("SendMessageBatch", ReadTimeoutError(endpoint_url="x"), after=True)
        found = [lost, *[Fault("SendMessageBatch", "Throttling")] * 12]
    if rng.random() < 0.1:  # SQS carries deletes out, but all responses get lost
        found += [Fault("DeleteMessageBatch", ReadTimeoutError(endpoint_url="x"), after=True)] * 12
    if rng.random() < 0.1:  # AWS denies calls, as after a change of the queue's policy
        found += [Fault(rng.choice(ACTIONS), "AccessDenied")] * rng.randint(1, 3)
    if rng.random() < 0.1:
        found += [Fault("SendMessageBatch", "InvalidMessageContents")] * rng.randint(1, 3)
    if rng.random() < 0.1:  # up to 8 failures, more than the engine's 6 tries to count messages
        found += [Fault("GetQueueAttributes", "InternalError")] * rng.randint(1, 8)
    if rng.random() < 0.2:  # the redrive cannot renew any visibility timeout
        found += [Fault("ChangeMessageVisibilityBatch", "InternalError")] * 200
    return found


def pass_by(found: list[Fault]) -> bool:
    """Return whether a redrive that repeats failed calls gets past these faults."""
    tried = Counter(fault.action for fault in found)
    del tried["ChangeMessageVisibilityBatch"]  # a run goes on if this call fails
    is_for_ever = any(fault.error == "AccessDenied" for fault in found)
    return not is_for_ever and max(tried.values(), default=0) < TRIES


class History:
    """One history of redrives. Its seed decides all that happens."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        latency = rng.choice((0.0, 0.02, 1.0))
        self.is_fifo = rng.random() < 0.2
        self.world = world = World(
            directory, seed=seed, latency=latency, threads=None, fifo=self.is_fifo
        )
        self.bodies = [f"m{n}" for n in range(rng.choice((1, 7, 23, 40)))]
        self.groups = rng.choice((1, 3))
        self.body_of = {self.fill(n, body): body for n, body in enumerate(self.bodies)}
        self.bounced: set[str] = set()
        self.may_bounce = 0 if self.is_fifo else rng.choice((0, 0, 0, 3))
        self.shows_twice = 0.0 if self.is_fifo else rng.choice((0.0, 0.0, 0.1))
        is_alone = self.is_fifo or self.shows_twice or self.may_bounce
        self.has_rival = not is_alone and rng.random() < 0.5
        source = world.sqs.queues[world.source.url]
        source.stale_handles_delete = rng.random() < 0.7
        self.signalled_at: int | None = None
        self.steps_to_second_signal: int | None = None
        self.full_at = 0  # from this step on, the disk is full for ten steps; 0 means never
        self.was_full = False
        self.oversleeps = rng.random() < 0.1
        world.on_event, world.before_step = self.on_event, self.before_step
        world.is_disk_full = self.is_disk_full
        self.options: dict[str, Any] = {"max_replays": 1_000}
        self.options["hold_seconds"] = rng.choice((None, None, 5))
        if rng.random() < 0.4:
            self.options["rate"] = rng.choice(("2/s", "50/s", "10/m"))

    def fill(self, number: int, body: str) -> str:
        if not self.is_fifo:
            return self.world.fill(body)[0]
        group = f"g{number % self.groups}"
        return self.world.fill(body, MessageGroupId=group, MessageDeduplicationId=body)[0]

    def is_disk_full(self) -> bool:
        is_full = 0 < self.full_at <= self.world.steps < self.full_at + 10
        self.was_full |= is_full
        return is_full

    def signals(self) -> None:
        """Send the redrive a first signal, and a second one while it gives messages back."""
        world = self.world
        if world.steps == self.signalled_at:
            world.stop.set()
        if world.stop.is_set() and world.is_main_thread and self.steps_to_second_signal is not None:
            if not self.steps_to_second_signal:
                self.steps_to_second_signal = None
                raise KeyboardInterrupt
            self.steps_to_second_signal -= 1

    def on_event(self, event: object) -> None:
        self.check_the_sum()
        if isinstance(event, MessagesSent) and len(self.bounced) < self.may_bounce:
            self.bounce()
        if self.rng.random() < self.shows_twice:  # SQS may deliver a message that is in flight
            in_flight = self.world.sqs.queues[self.world.source.url].in_flight()
            if in_flight:
                self.rng.choice(in_flight).visible_at = self.world.clock.now

    def before_step(self) -> None:
        if self.oversleeps and self.rng.random() < 0.02:  # the machine was suspended
            self.world.clock.now += 400
        if self.has_rival and self.rng.random() < 0.5:
            self.take_what_is_visible()
        self.signals()

    def take_what_is_visible(self) -> None:
        """Act as another redrive of the same queue, which sends all messages that are visible."""
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
        """Act as a worker that receives a redriven message and makes it a dead letter again."""
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
        """Check that the counts in the redrive's ledger agree with the states of its messages."""
        assert self.world.run is not None
        ledger = self.world.run.ledger
        received = [row for row in ledger.rows.values() if row.handle is not None]
        assert len(received) + ledger.deleted == ledger.looked_at
        left = Counter(row.left for row in received if row.state is RowState.LEFT)
        assert +ledger.left == left

    def check_the_end(self, events: list[Any], report: RedriveReport | None) -> None:
        """Check that the last event of a redrive that was not killed agrees with its ledger."""
        assert self.world.run is not None
        if not events:  # the redrive has not begun, because it could not count the messages
            assert report is None
            return
        assert [type(event) for event in events].count(Finished) == 1
        assert isinstance(events[-1], Finished)
        found = events[-1].report
        assert report is None or report == found
        ledger = self.world.run.ledger
        assert found.not_deleted == len(ledger.undeleted)
        named = {id_ for e in events if isinstance(e, NotDeleted) for id_ in e.ids}
        assert named >= set(ledger.undeleted), "a message was sent, not deleted, and not named"
        if found.ended in (Ended.DONE, Ended.INCOMPLETE):
            states = {row.state for row in ledger.rows.values() if row.handle is not None}
            assert states <= {RowState.SENT, RowState.LEFT}, "done, but a message has not ended"
            left = found.failed + found.skipped + found.poison + found.not_deleted
            left += ledger.left[Action.HOLD]
            assert left + found.deleted == found.looked_at, "the report does not add up"

    def redrive(self, resend: bool = True) -> RedriveReport:
        """Redrive, and check that a run that ends as done leaves only messages that it counts.

        Messages that came back from a worker may also be left.
        """
        source = self.world.sqs.queues[self.world.source.url]
        before = {message.id for message in source.messages}
        copies, bounced = self.world.bodies(self.world.main), len(self.bounced)
        events = len(self.world.events)
        try:
            report = self.world.redrive(**self.options, include_unknown=resend)
            self.check_the_end(self.world.events[events:], report)
        except (KeyboardInterrupt, RedriveError):
            self.check_the_end(self.world.events[events:], None)
            raise
        finally:
            # A FIFO queue drops a repeated send within five minutes, so the redrive may repeat it.
            # If the machine is suspended just before the call, the five minutes may be over. No
            # program can prevent this.
            if not resend and not self.has_rival and not (self.is_fifo and self.oversleeps):
                now = self.world.bodies(self.world.main)
                assert all(
                    n <= max(1, copies[body]) or body in self.bounced for body, n in now.items()
                ), "a message in doubt was sent again without --include-unknown"
        # A message that came back during the run could be counted in the place of another message.
        if report.ended is Ended.DONE and bounced == len(self.bounced):
            counted = report.failed + report.skipped + report.poison + report.not_deleted
            counted += 0 if resend else report.in_doubt
            left = [message for message in source.messages if message.id in before]
            assert len(left) <= counted, (
                "done, but messages are left that the report does not count"
            )
        return report

    def run(self) -> None:
        rng, world = self.rng, self.world
        holds = rng.choice((0.0, 0.0, 0.5, 1.0))
        for _ in range(rng.randint(0, 4)):
            world.sqs.faults += faults(rng)
            world.dies_at = (rng.randint(1, 60), rng.random() < 0.5) if rng.random() < 0.8 else None
            self.signalled_at = rng.randint(1, 60) if rng.random() < 0.3 else None
            self.steps_to_second_signal = rng.choice((None, 0, 1, 2, 3))
            self.full_at = rng.randint(1, 60) if rng.random() < 0.1 else 0
            with suppress(Killed, KeyboardInterrupt, RedriveError):
                self.redrive(rng.random() >= holds)
            world.sqs.faults.clear()
            world.clock.now += rng.choice((0, 5, 40, 400))
        world.dies_at, self.may_bounce = None, 0
        self.signalled_at, self.full_at, self.oversleeps = None, 0, False
        last = faults(rng)
        world.sqs.faults += last
        report = None
        for _ in range(6):
            with suppress(RedriveError):
                report = self.redrive()
                is_unreachable = report.ended is Ended.UNREACHABLE
                assert not (is_unreachable and pass_by(last)), "the redrive gave up too early"
            last = []
            world.sqs.faults.clear()
            world.clock.now += 400
            is_done = report is not None and report.ended is Ended.DONE
            if is_done and not world.bodies(world.source):
                break
        self.judge(report)

    def judge(self, report: RedriveReport | None) -> None:
        world, body_of = self.world, self.body_of
        named = {body_of[i] for e in world.events if isinstance(e, InDoubt) for i in e.ids}
        copies = world.bodies(world.main)
        assert set(copies) == set(self.bodies), "a message is lost or not sent"
        twice = {body for body, count in copies.items() if count > 1}
        assert twice <= named, f"sent twice and not named: {twice - named}"
        told = Counter(id_ for e in world.events if isinstance(e, MessagesSent) for id_ in e.ids)
        if not self.was_full:
            assert max(told.values(), default=1) == 1, "a message was reported as sent twice"
        if self.is_fifo:
            for group in range(self.groups):
                order = list(dict.fromkeys(self.arrived(f"g{group}")))
                assert order == self.bodies[group :: self.groups], "a group's order is lost"
        assert not world.bodies(world.source)
        assert report is not None
        assert report.remaining == 0 or self.has_rival
        assert world.journal_path.read_text().endswith('{"is":"ended"}\n')

    def arrived(self, group: str) -> list[str]:
        main = self.world.sqs.queues[self.world.main.url]
        return [message.body for message in main.messages if message.group_id == group]


def history(seed: int, directory: Path) -> None:
    """Run a history.

    Raises:
        AssertionError: something is wrong. The engine may also raise any other error.
    """
    History(seed, directory).run()


def first_failure(seeds: range) -> tuple[int, Exception] | None:
    """Return the first seed whose history fails, and its error. None if no history fails."""
    with TemporaryDirectory() as directory:
        for seed in seeds:
            try:
                Path(directory, str(seed)).mkdir()
                history(seed, Path(directory, str(seed)))
            except Exception as exc:  # noqa: BLE001  # no history may end with an error
                return seed, exc
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate redrives with faults and kills.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history [0]")
    parser.add_argument("--histories", type=int, default=2_000, help="number of histories [2000]")
    options = parser.parse_args()
    failure = first_failure(range(options.seed, options.seed + options.histories))
    if failure is None:
        print(f"{options.histories} histories from seed {options.seed}: no error")
        return 0
    print(f"seed {failure[0]}: {type(failure[1]).__name__}: {failure[1]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Run random histories of guards, steps and workflows in which processes are killed at any line.

``make simulate-safe`` runs ``python -m tests.simulation.safe --histories 2000 --seed 0``.

Each history draws runs of some messages. A run may be killed at any line of
``celery_sqs_backoff.safe`` or of the task's own work, and SQS then delivers the message again. The
clock is virtual, and the store is in memory. At the end, the history checks the promises. In a
third of the histories, calls of the store sometimes fail, before or after they have an effect.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from types import CodeType
from typing import Any

from celery import Celery

from celery_sqs_backoff import Guard, Retryable, SQSBackoffTask

from . import workflow
from .kills import Killed, MortalStore, killed_after

#: A process can be killed at a line of these files of ours, and of these functions in this file.
_OURS = ("celery_sqs_backoff/safe/", "celery_sqs_backoff/store/records")
_WORK = ("mail", "pay", "charge", "confirm", "fund", "act", "undo")


class World:
    """A store, a clock, and the effects outside of them. Each history begins a new one."""

    def __init__(self) -> None:
        #: A run is killed at one of its first 400 lines. A whole run has about 400 lines.
        self.lines = 400
        #: The share of the store's calls that fail.
        self.store_fails = 0.0
        self.app = Celery("simulation", broker="memory://", set_as_current=False)
        self.app.finalize()
        self.app.task = partial(self.app.task, shared=False, base=SQSBackoffTask)
        self.app.conf.task_always_eager = True
        self.begin(0)

    def begin(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 1_000_000.0
        self.is_dead = False
        self.effects: Counter[str] = Counter()
        self.done: list[str] = []
        self.store = MortalStore(clock=lambda: self.now)
        self.store.world = self
        self.store_fails = self.rng.choice([0.0, 0.0, 0.2])
        self.app.conf.sqs_backoff = {"store": self.store, "secret": "simulation"}

    def run(self, task: Any, *args: Any, task_id: str, killable: bool = True) -> Any:
        """Run a message once, and return its result, or None if the process was killed."""
        return self.attempt(lambda: task.apply(args, task_id=task_id), killable=killable)

    def attempt(self, act: Callable[[], Any], *, killable: bool = True) -> Any:
        """Call a function in a process. Return its result, or None if the process was killed."""
        lines = self.rng.randint(1, self.lines) if killable and self.rng.random() < 0.7 else 0
        try:
            return killed_after(lines, self, act, where=_counts)
        except Killed:
            self.effects["killed"] += 1
            return None


def _counts(code: CodeType) -> bool:
    is_work = code.co_filename == __file__ and code.co_name in _WORK
    return is_work or any(ours in code.co_filename for ours in _OURS)


History = Callable[[int], None]


def guarded(world: World) -> History:
    """Return histories of a guard, which lets only one of two messages send the mail.

    This message may send the mail again if the worker does not know that it was sent.
    """

    @world.app.task(bind=True, name="mail", guard=Guard(key="7", window=3e9))
    def mail(self: Any) -> str:
        how = world.rng.random() if world.effects["troubles"] else 1.0
        if how < 0.2:
            raise Retryable("refused: nothing was sent")
        world.done.append(self.request.id)
        if how < 0.3:
            raise ValueError("the response was lost")
        return "sent"

    def history(seed: int) -> None:
        world.begin(seed)
        world.effects["troubles"] = 1
        ended_well: set[str] = set()
        for _ in range(6):
            message = world.rng.choice("AB")
            before = len(world.done)
            ended = world.run(mail, task_id=message)
            if message in ended_well:
                assert len(world.done) == before, "the work was done, and the task ran again"
            # If the store fails, a run can succeed without a record of its success.
            if ended is not None and ended.state == "SUCCESS" and not world.store_fails:
                ended_well.add(message)
        assert len(set(world.done)) <= 1, f"two messages have sent: {world.done}"
        world.effects["troubles"] = 0
        world.store_fails = 0.0
        for message in "AB":  # Now nothing fails and no process is killed, so the mail is sent.
            world.run(mail, task_id=message, killable=False)
        assert len(set(world.done)) == 1, f"sent by {set(world.done)}"

    return history


def stepped(world: World) -> History:
    """Return histories of a step. The provider works only once, and the step is confirmed."""

    @world.app.task(name="confirm")
    def confirm(done: object) -> None:
        world.effects["confirmed"] += 1

    @world.app.task(bind=True, name="pay")
    def pay(self: Any) -> str:
        key = self.idempotency_key("charge")
        return str(self.step("charge", charge, key, confirm=confirm.s()))

    def charge(key: str) -> str:
        world.done.append(key)  # the provider does the work only once for each key
        return "receipt"

    world.lines = 600

    def history(seed: int) -> None:
        world.begin(seed)
        recorded = False
        for last in (False,) * 4 + (True,):
            calls = len(world.done)
            world.store_fails = 0.0 if last else world.store_fails
            ended = world.run(pay, task_id="A", killable=not last)
            assert not recorded or len(world.done) == calls, "the step was recorded and done again"
            recorded = recorded or (ended is not None and ended.state == "SUCCESS")
        assert recorded
        assert len(set(world.done)) == 1
        assert world.effects["confirmed"], "the step was never confirmed"

    return history


#: Histories of workflows have a world of their own, in ``workflow.py``.
WORKFLOW = "workflow"

KINDS: dict[str, Callable[[World], History]] = {
    "guard": guarded,
    "step": stepped,
}


def simulate(kind: str, *, histories: int, seed: int = 0) -> Counter[str]:
    """Run histories of one kind, and return how often each thing has happened in them.

    Raises:
        AssertionError: a promise was broken. The message has the seed of the history.
    """
    logging.disable(logging.CRITICAL)
    happened: Counter[str] = Counter()
    try:
        if kind != WORKFLOW:
            world = World()
            history = KINDS[kind](world)
        for number in range(seed, seed + histories):
            try:
                if kind == WORKFLOW:
                    happened.update(workflow.play(number))
                    continue
                history(number)
            except AssertionError as exc:
                raise AssertionError(f"{kind}, seed {number}: {exc}") from exc
            happened.update(killed=world.effects["killed"], effects=len(world.done))
    finally:
        logging.disable(logging.NOTSET)
    return happened


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--histories", type=int, default=2000, help="number of each kind [2000]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history [0]")
    parser.add_argument("--kind", choices=(*KINDS, WORKFLOW), action="append", help="default: all")
    options = parser.parse_args()
    for kind in options.kind or (*KINDS, WORKFLOW):
        started = time.monotonic()
        happened = simulate(kind, histories=options.histories, seed=options.seed)
        seconds = time.monotonic() - started
        print(
            f"{kind:9} {options.histories} histories, {happened['killed']} processes killed,"
            f" {happened['effects']} effects: all promises held ({seconds:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()

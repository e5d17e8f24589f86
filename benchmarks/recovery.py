"""How long does a fleet need for its backlog after an outage, beside the shortest possible time?

The simulator plays scenes with the package's own gate and law: fast and slow calls, small and large
fleets, short and long outages, brown-outs, and a capacity that changes. The ratio counts from the
first success after the outage. The shortest time lets new messages run as they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from statistics import mean

import click

from celery_sqs_backoff.retry.decision import Reply
from celery_sqs_backoff.simulate.engine import SimulatedProvider, _Simulation
from celery_sqs_backoff.simulate.scenario import Scenario
from celery_sqs_backoff.simulate.worker import SimulatedMessage, SimulatedWorker

__all__ = ["SCENES", "Figures", "Scene", "main", "play"]

#: While the provider is up, new messages come at this share of its capacity.
_FRESH = 0.1

#: A brown-out lasts for this many seconds after the outage.
_BROWN_OUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Scene:
    """An outage and a fleet. Times are in seconds.

    Attributes:
        workers, processes: the fleet.
        call: how long a call takes.
        capacity: calls that the provider takes in each second; more are answered 429.
        outage: how long the provider is down.
        backlog: time for which the messages keep the provider busy at its capacity.
        is_bucket: the provider counts with a bucket of tokens, not in each second of the clock.
        brown_out: share of the calls that fail in the half hour after the outage.
        change: seconds after the outage, and the factor by which the capacity then changes.
        is_unnamed: a refused call looks like a failed one.
        max_receive_count: of the queue.
    """

    workers: int = 10
    processes: int = 8
    call: float = 0.2
    capacity: float = 20.0
    outage: float = 600.0
    backlog: float = 60.0
    is_bucket: bool = False
    brown_out: float = 0.0
    change: tuple[float, float] | None = None
    is_unnamed: bool = False
    max_receive_count: int | None = None

    def capacity_at(self, seconds: float) -> float:
        """Return the capacity at this time after the outage."""
        is_changed = self.change is not None and seconds >= self.change[0]
        return self.capacity * self.change[1] if is_changed and self.change else self.capacity

    def shortest(self, messages: float) -> float:
        """Return the shortest time for these messages, while new ones run as they come."""
        most, step, at = self.workers * self.processes / self.call, 0.25, 0.0
        while messages > 0:
            share = 1 - (self.brown_out if at < _BROWN_OUT_SECONDS else 0.0)
            a_second = min(self.capacity_at(at), most) * share - self.capacity * _FRESH
            messages -= step * max(a_second, 1e-3)
            at += step
        return at + self.call


SCENES = {
    "1 worker, 0.05 s": Scene(workers=1, call=0.05),
    "1 worker, 40 processes, 1 s": Scene(workers=1, processes=40, call=1.0),
    "2 workers, 40 processes, 3 s": Scene(workers=2, processes=40, call=3.0),
    "3 workers": Scene(workers=3),
    "10 workers, 0.05 s": Scene(call=0.05),
    "10 workers, 0.2 s": Scene(),
    "10 workers, 0.5 s": Scene(call=0.5),
    "10 workers, 1 s": Scene(call=1.0),
    "10 workers, 3 s": Scene(call=3.0),
    "10 workers of 1 process": Scene(processes=1),
    "50 workers of 2, 0.2 s": Scene(workers=50, processes=2),
    "50 workers of 2, 1 s": Scene(workers=50, processes=2, call=1.0),
    "50 workers, 200/s": Scene(workers=50, capacity=200.0),
    "backlog of 10 s": Scene(backlog=10.0),
    "backlog of 600 s": Scene(backlog=600.0),
    "backlog of 600 s, 1 s": Scene(backlog=600.0, call=1.0),
    "outage of 30 s": Scene(outage=30.0),
    "2 h, backlog of 600 s": Scene(outage=7200.0, backlog=600.0),
    "3 workers, 2 h": Scene(workers=3, outage=7200.0),
    "12 h, backlog of 600 s": Scene(outage=43_200.0, backlog=600.0),
    "token bucket": Scene(is_bucket=True),
    "5 % fail": Scene(brown_out=0.05),
    "20 % fail": Scene(brown_out=0.2),
    "50 % fail": Scene(brown_out=0.5),
    "capacity halves": Scene(backlog=300.0, change=(60.0, 0.5)),
    "capacity doubles": Scene(backlog=300.0, change=(60.0, 2.0)),
    "429 unnamed": Scene(is_unnamed=True),
    "429 unnamed, 20 % fail": Scene(is_unnamed=True, brown_out=0.2),
    "maxReceiveCount 10, 2 h": Scene(outage=7200.0, max_receive_count=10),
    "1 worker, 100/s": Scene(workers=1, capacity=100.0, processes=40),
}


@dataclass(frozen=True)
class Figures:
    """What a scene cost.

    Attributes:
        ratio: time from the first success to the end of the backlog, beside the shortest time.
            Infinite if the backlog did not end.
        refused: 429s, for each 100 messages.
        wasted: calls during the outage.
        detected: seconds from the end of the outage to the first success.
        dead: messages that were given up.
    """

    ratio: float
    refused: float
    wasted: int
    detected: float
    dead: int


class _Provider(SimulatedProvider):
    """Fails during the outage. Then it takes so many calls in each second."""

    def __init__(self, scene: Scene, scenario: Scenario, rng: Random) -> None:
        super().__init__(scenario)
        self._scene, self._rng = scene, rng
        self._second, self._count = -1, 0

    def call(self, now: float) -> Reply:
        after = now - self._scene.outage
        if after < 0:
            return Reply.FAILED
        self._capacity = self._scene.capacity_at(after)
        if self._scene.is_bucket:
            reply = super().call(now)
        else:
            if int(now) != self._second:
                self._second, self._count = int(now), 0
            self._count += 1
            reply = Reply.REFUSED if self._count > self._capacity else Reply.ANSWERED
        if reply is Reply.REFUSED:
            return Reply.FAILED if self._scene.is_unnamed else reply
        is_brown = after < _BROWN_OUT_SECONDS and self._rng.random() < self._scene.brown_out
        return Reply.FAILED if is_brown else reply


class _Recovery(_Simulation):
    def __init__(self, scene: Scene, seed: int) -> None:
        scenario = Scenario(
            outage=scene.outage,
            rate=scene.backlog * scene.capacity / scene.outage,
            capacity=scene.capacity,
            call_seconds=scene.call,
            workers=scene.workers,
            processes=scene.processes,
            max_receive_count=scene.max_receive_count,
        )
        super().__init__(scenario, "provider", seed)
        self._scene = scene
        self._provider = _Provider(scene, scenario, Random(seed + 1))
        self._newest, self._left = 0, 1
        self.first_at = math.inf

    def _push(self, at: float, handle: Callable[..., None], *arguments: object) -> None:
        if self._left:  # else the backlog is done, and the simulation ends
            super()._push(at, handle, *arguments)

    def _on_recovery(self) -> None:
        super()._on_recovery()
        self._newest, self._left = self.result.messages, self._alive
        self._send_later()

    def _send_later(self) -> None:
        rate = self._scene.capacity * _FRESH
        self._push(self.now + self._rng.expovariate(rate), self._send_fresh)

    def _send_fresh(self) -> None:
        self._send()
        self._send_later()

    def _settle(self, worker: SimulatedWorker, message: SimulatedMessage) -> None:
        super()._settle(worker, message)
        if not self._newest:
            return
        self.first_at = min(self.first_at, self.now)
        if int(message.delivery.message_id) <= self._newest:
            self._left -= 1
            if not self._left:
                self._heap.clear()


def play(scene: Scene, seed: int) -> Figures:
    """Play a scene once. The same seed gives the same figures."""
    simulation = _Recovery(scene, seed)
    result = simulation.run()
    detected = simulation.first_at - scene.outage
    shortest = scene.shortest(result.backlog + scene.capacity * _FRESH * detected)
    settled = result.receives.total()
    failed = result.calls[Reply.FAILED]
    return Figures(
        ratio=(result.ended_at - simulation.first_at) / shortest,
        refused=100 * result.count_calls(Reply.REFUSED) / settled,
        wasted=sum(number for second, number in failed.items() if second < scene.outage),
        detected=detected,
        dead=result.dead_letters,
    )


def _row(name: str, of_scene: list[Figures]) -> str:
    ratios = [each.ratio for each in of_scene]
    refused, wasted, detected, dead = (
        mean(getattr(each, field) for each in of_scene)
        for field in ("refused", "wasted", "detected", "dead")
    )
    return (
        f"{name:<30}{mean(ratios):6.2f} ({min(ratios):5.2f}..{max(ratios):5.2f})"
        f"{refused:9.1f}{wasted:9.0f}{detected:10.1f}{dead:7.1f}"
    )


@click.command(help=__doc__)
@click.option("--seeds", default=4, show_default=True, type=click.IntRange(1), help="Runs of each.")
@click.option("--first-seed", default=0, show_default=True)
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1), help="At a time.")
@click.option("--scene", "chosen", multiple=True, help="Scenes with this text in their names.")
def main(*, seeds: int, first_seed: int, jobs: int, chosen: tuple[str, ...]) -> None:
    """Play the scenes and print a table."""
    names = [name for name in SCENES if not chosen or any(part in name for part in chosen)]
    click.echo(
        f"{'':30}{'ratio':>6} {'least..most':>14}{'refused':>9}{'wasted':>9}{'detected':>10}   dead"
    )
    means = list[float]()
    with ProcessPoolExecutor(jobs) as pool:
        runs = {
            name: [pool.submit(play, SCENES[name], first_seed + n) for n in range(seeds)]
            for name in names
        }
        for name, futures in runs.items():
            figures = [each.result() for each in futures]
            means.append(mean(each.ratio for each in figures))
            click.echo(_row(name, figures))
    click.echo(f"mean of the ratios {mean(means):.2f}, worst mean {max(means):.2f}")


if __name__ == "__main__":
    main()

"""The figures of a chaos run, as a table, and whether anything went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Extra:
    """A run that began after another run had settled the message.

    ``why`` names the injected fault that explains it. None means that there is a bug.
    """

    task_id: str
    why: str | None
    timeline: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of one chaos run. ``letters`` has the reasons of each task's dead letters."""

    seed: int
    sent: Sequence[str]
    done: Set[str]
    letters: Mapping[str, Sequence[str | None]]
    runs: int
    extras: Sequence[Extra]
    #: IDs of tasks with more than one dead letter, if no injected fault explains this.
    copies_of_nothing: Sequence[str]
    faults: Mapping[str, int]
    deeds: Mapping[str, int]
    workers: int
    #: The output of each worker that did not start, or that ended by itself.
    deserted: Sequence[str]
    #: How many messages are left on the queue, visible and hidden. Empty if no message is left.
    left: Sequence[int]

    @property
    def lost(self) -> list[str]:
        """The IDs of tasks that are not done and are no dead letters."""
        return [task_id for task_id in self.sent if task_id not in self.done | self.letters.keys()]

    @property
    def without_reason(self) -> list[str]:
        return [task_id for task_id, reasons in self.letters.items() if not all(reasons)]

    @property
    def unexplained(self) -> list[Extra]:
        return [extra for extra in self.extras if extra.why is None]

    @property
    def is_good(self) -> bool:
        return not (
            self.lost
            or self.left
            or self.without_reason
            or self.unexplained
            or self.copies_of_nothing
            or self.deserted
        )

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table and, if something went wrong, facts to find out why."""
        reasons = Counter(reasons[0] for reasons in self.letters.values())
        copies = sum(len(reasons) - 1 for reasons in self.letters.values())
        rows: list[tuple[str, object]] = [
            ("seed", self.seed),
            ("sent", len(self.sent)),
            ("done", len(self.done)),
            ("dead-lettered", len(self.letters)),
            *((f"  {reason}", n) for reason, n in sorted(reasons.items(), key=str)),
            ("  second copies of a dead letter", copies),
            ("  copies unexplained", len(self.copies_of_nothing)),
            ("lost", len(self.lost)),
            ("left on the queue", sum(self.left)),
            ("runs", self.runs),
            ("runs after the message was settled", len(self.extras)),
            *((f"  {why}", n) for why, n in Counter(e.why for e in self.extras if e.why).items()),
            ("  unexplained", len(self.unexplained)),
            ("workers", self.workers),
            ("  that ended by themselves", len(self.deserted)),
            *((f"  {deed}", n) for deed, n in sorted(self.deeds.items())),
            ("calls spoiled", sum(self.faults.values())),
            *((f"  {kind}", n) for kind, n in sorted(self.faults.items())),
        ]
        for name, value in rows:
            yield f"{name:<64}{value:>8}"
        for task_id in self.lost:
            yield f"LOST {task_id}"
        for task_id in self.copies_of_nothing:
            yield f"COPIED {task_id}"
        for extra in self.unexplained:
            yield f"UNEXPLAINED {extra.task_id}"
            yield from (f"    {line}" for line in extra.timeline)
        for log in self.deserted:
            yield f"ENDED BY ITSELF\n{log}"

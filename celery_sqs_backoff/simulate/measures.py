"""What a simulation counts: a fold over its events, of constant size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Call", "Measures", "Request", "percentile"]

#: Points of a curve. A simulation that lasts longer doubles the width of its points.
CURVE_POINTS = 720


class Call(Enum):
    """Calls of the provider, by how they ended."""

    SENT = "sent"
    WASTED = "wasted"
    TURNED_AWAY = "turned away"

    __hash__ = object.__hash__  # members are single; Enum's own hash costs a call per count


class Request(Enum):
    """Requests to SQS that a worker pays for."""

    RECEIVE = "ReceiveMessage"
    CHANGE_VISIBILITY = "ChangeMessageVisibilityBatch"
    DELETE = "DeleteMessageBatch"
    SEND = "SendMessageBatch"

    __hash__ = object.__hash__


class Curve:
    """Numbers of events over time, in at most ``CURVE_POINTS`` points."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.counts: list[int] = []

    def add(self, now: float, number: int = 1) -> None:
        index = int(now / self.seconds)
        while index >= CURVE_POINTS:
            pairs = zip(self.counts[::2], [*self.counts[1::2], 0], strict=False)
            self.counts = [a + b for a, b in pairs]
            self.seconds *= 2
            index = int(now / self.seconds)
        counts = self.counts
        if index >= len(counts):
            counts.extend([0] * (index + 1 - len(counts)))
        counts[index] += number

    def per_second(self) -> list[tuple[float, float]]:
        """Return (time, events a second)."""
        return [(i * self.seconds, n / self.seconds) for i, n in enumerate(self.counts)]


@dataclass
class Measures:
    """The counts of one simulation. Times are seconds from its start."""

    messages: int = 0
    calls: Counter[Call] = field(default_factory=Counter)
    curves: dict[Call, Curve] = field(default_factory=lambda: {call: Curve() for call in Call})
    dead: Counter[str] = field(default_factory=Counter)
    first_dead_at: float | None = None
    dead_curve: Curve = field(default_factory=Curve)
    #: Number of messages by how often each was received.
    receives: Counter[int] = field(default_factory=Counter)
    requests: Counter[Request] = field(default_factory=Counter)
    in_flight_peak: int = 0
    sent_twice: int = 0
    backlog_at_recovery: int = 0
    #: The last message that was sent before the recovery is settled; ``None`` = not all are.
    drained_at: float | None = None
    ended_at: float = 0.0

    def called(self, call: Call, now: float) -> None:
        self.calls[call] += 1
        self.curves[call].add(now)

    def died(self, reason: str, now: float) -> None:
        self.dead[reason] += 1
        self.dead_curve.add(now)
        if self.first_dead_at is None:
            self.first_dead_at = now


def percentile(histogram: Counter[int], share: float) -> int:
    """Return the smallest value that at least ``share`` of the entries do not exceed; 0 = none."""
    total, seen = sum(histogram.values()), 0
    for value in sorted(histogram):
        seen += histogram[value]
        if seen >= share * total:
            return value
    return 0

"""What the fault proxy can do to a call to SQS, and what it counts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "Count",
    "Fault",
    "Rule",
    "delayed",
    "drop_after",
    "drop_before",
    "expired_token",
    "failed_entries",
    "http_error",
    "throttled",
    "unavailable",
]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule. The first rule that is meant for a call decides about it.

    ``actions``: SQS action names; none = all. ``times``: how many calls it spoils; ``None`` = until
    healed. ``probability``: per call, and for ``fail-entries`` per entry, drawn from ``seed``.
    ``queue``: URL of the only queue whose calls it spoils; empty = any.
    """

    kind: Literal["error", "drop-before", "drop-after", "delay", "fail-entries"]
    actions: Sequence[str] = ()
    times: int | None = None
    queue: str = ""
    probability: float = 1.0
    seed: int = 0
    # error, fail-entries
    status: int = 500
    code: str = "InternalFailure"
    message: str = "injected by the fault proxy"
    sender_fault: bool = False
    #: delay: how long the answer is held back.
    seconds: float = 0.0
    #: fail-entries: positions in the batch, from 0; none = all.
    positions: Sequence[int] = ()


def http_error(status: int, code: str, *, sender_fault: bool = False, **rule: Any) -> Fault:
    """Answer with an SQS error, in the JSON protocol's form; the call is not forwarded."""
    return Fault(kind="error", status=status, code=code, sender_fault=sender_fault, **rule)


def unavailable(**rule: Any) -> Fault:
    """Answer 503."""
    return http_error(503, "ServiceUnavailable", **rule)


def throttled(**rule: Any) -> Fault:
    """Answer as SQS does beyond its request rate."""
    return http_error(400, "ThrottlingException", sender_fault=True, **rule)


def expired_token(**rule: Any) -> Fault:
    """Answer as AWS does when the session token has run out."""
    return http_error(403, "ExpiredToken", sender_fault=True, **rule)


def drop_before(**rule: Any) -> Fault:
    """Close the connection; SQS has not seen the request."""
    return Fault(kind="drop-before", **rule)


def drop_after(**rule: Any) -> Fault:
    """Close the connection after SQS has acted on the request: the answer is lost."""
    return Fault(kind="drop-after", **rule)


def delayed(seconds: float, **rule: Any) -> Fault:
    """Hold the answer back for some seconds; SQS has acted at once."""
    return Fault(kind="delay", seconds=seconds, **rule)


def failed_entries(
    *positions: int, code: str = "InternalError", sender_fault: bool = False, **rule: Any
) -> Fault:
    """Answer entries of a batch in ``Failed``; only the others are forwarded."""
    return Fault(
        kind="fail-entries", positions=positions, code=code, sender_fault=sender_fault, **rule
    )


@dataclass
class Count:
    """What the proxy has seen of one action."""

    calls: int = 0
    #: Entries of the batch calls.
    entries: int = 0
    #: Messages that ReceiveMessage has returned.
    messages: int = 0
    #: Calls that a rule has spoilt. They are in ``calls`` too.
    faults: int = 0


@dataclass
class Rule:
    """A fault at work: it knows how many calls it may still spoil."""

    fault: Fault
    rng: random.Random = field(init=False)
    times_left: float = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.fault.seed)
        self.times_left = float("inf") if self.fault.times is None else self.fault.times

    def spoils(
        self, action: str, entries: Sequence[Mapping[str, Any]], queue: str = ""
    ) -> set[int] | None:
        """Positions of the entries to fail (empty: it is not about entries), or ``None``."""
        fault = self.fault
        if not self.times_left or (fault.actions and action not in fault.actions):
            return None
        if fault.queue and fault.queue.rpartition("/")[2] != queue.rpartition("/")[2]:
            return None
        failing: set[int] = set()
        if fault.kind == "fail-entries":
            chosen = set(fault.positions) or range(len(entries))
            failing = {i for i in range(len(entries)) if i in chosen and self._falls()}
            if not failing:
                return None
        elif not self._falls():
            return None
        self.times_left -= 1
        return failing

    def _falls(self) -> bool:
        return self.rng.random() < self.fault.probability

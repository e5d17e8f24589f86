"""A proxy in front of an SQS endpoint that counts the calls, and makes chosen ones go wrong.

It runs in a process of its own, so that it does not disturb the measured one::

    with fault_proxy(upstream) as proxy:
        proxy.inject(unavailable(actions=("DeleteMessageBatch",), times=1))
        ...  # talk to proxy.endpoint
        assert proxy.counts()["DeleteMessageBatch"].calls == 2

``python -m tests.support.fault_proxy --upstream URL`` runs it by hand and prints its two URLs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .processes import eventually, stop


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


class FaultProxy:
    """A running proxy. ``endpoint`` is the URL for SQS clients."""

    def __init__(self, endpoint: str, control: str) -> None:
        self.endpoint = endpoint
        self._control = control

    def counts(self) -> dict[str, Count]:
        """Return the counts since the last :meth:`reset`. An action never called counts zero."""
        seen = {action: Count(**count) for action, count in self._call("GET", "counts").items()}
        return _ZeroByDefault(seen)

    def reset(self) -> None:
        """Forget counts and records, and keep rules and latency."""
        self._call("POST", "reset")

    def inject(self, *faults: Fault) -> None:
        """Add rules behind those there are."""
        self._call("POST", "faults", [asdict(fault) for fault in faults])

    def heal(self, queue: str = "") -> None:
        """Drop all rules, or all rules for the queue with this URL, and be reachable."""
        self._call("POST", "heal", queue)

    def set_latency(self, milliseconds: float) -> None:
        """Add a delay to each call before it is forwarded."""
        self._call("POST", "latency", milliseconds)

    def unreachable(self, seconds: float | None = None) -> None:
        """Refuse connections and cut those there are, for some seconds or until :meth:`heal`."""
        self._call("POST", "unreachable", seconds)

    def record(self, *actions: str) -> None:
        """Keep the future requests of these actions, and of no other ones."""
        self._call("POST", "record", actions)

    def requests(self, action: str) -> list[dict[str, Any]]:
        """Return the parsed bodies kept for an action, oldest first.

        All actions share 10,000 places.
        """
        return [body for name, body in self._call("GET", "requests") if name == action]

    def _call(self, method: str, path: str, body: object = None) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self._control}/{path}", data=data, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


class _ZeroByDefault(dict[str, Count]):
    def __missing__(self, action: str) -> Count:
        return Count()


@contextmanager
def fault_proxy(
    upstream: str, *, latency_ms: float = 0, sign: bool = False
) -> Iterator[FaultProxy]:
    """Run a proxy in front of ``upstream`` in a child process.

    With ``sign`` it signs the forwarded requests for AWS; see :mod:`tests.support.signing`.
    """
    options = ("--latency-ms", str(latency_ms), *(["--sign"] if sign else []))
    with (
        tempfile.TemporaryDirectory(prefix="fault-proxy-") as directory,
        running(__name__, upstream, *options, output=Path(directory, "output")) as proxy,
    ):
        yield proxy


@contextmanager
def running(module: str, upstream: str, *options: str, output: Path) -> Iterator[FaultProxy]:
    """Run the proxy of a module, which prints its URLs to ``output``."""
    # With these aiohttp reads strictly, and refuses moto's answers for their two Server headers.
    strict = {"PYTHONDEVMODE", "PYTHONASYNCIODEBUG"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--upstream", upstream, *options],
            cwd=Path(__file__).parents[2],
            env={name: v for name, v in os.environ.items() if name not in strict},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(
            lambda: process.poll() is not None or output.read_text().endswith("}\n"),
            timeout=60,
            message=lambda: f"the proxy did not start:\n{output.read_text()}",
        )
        if process.poll() is not None:
            raise RuntimeError(f"the proxy ended:\n{output.read_text()}")
        yield FaultProxy(**json.loads(output.read_text()))
    finally:
        stop(process)


if __name__ == "__main__":
    from . import fault_proxy_server  # with aiohttp, which no worker of a test needs

    fault_proxy_server.main()

"""A proxy in front of an SQS endpoint that counts calls, and makes chosen calls fail.

It runs in a process of its own, so that it does not slow down the process that a test measures::

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
    """A rule by which calls fail. If several rules match a call, the first one applies.

    Arguments:
        actions: the names of the SQS calls that fail. Without any, all calls fail.
        times: how many calls fail. None means all calls until :meth:`FaultProxy.heal`.
        probability: the probability that a call fails. With ``fail-entries``, it is the
            probability that an entry fails.
        seed: decides together with ``probability`` which calls fail.
        queue: the URL of the only queue whose calls fail. Empty means all queues.
    """

    kind: Literal["error", "drop-before", "drop-after", "delay", "fail-entries"]
    actions: Sequence[str] = ()
    times: int | None = None
    queue: str = ""
    probability: float = 1.0
    seed: int = 0
    # For the kinds error and fail-entries
    status: int = 500
    code: str = "InternalFailure"
    message: str = "injected by the fault proxy"
    sender_fault: bool = False
    #: For the kind delay: how long the proxy holds the response back.
    seconds: float = 0.0
    #: For the kind fail-entries: positions in the batch, from 0. Without any, all entries fail.
    positions: Sequence[int] = ()


def http_error(status: int, code: str, *, sender_fault: bool = False, **rule: Any) -> Fault:
    """Answer with an SQS error in the form of the JSON protocol. SQS does not get the call."""
    return Fault(kind="error", status=status, code=code, sender_fault=sender_fault, **rule)


def unavailable(**rule: Any) -> Fault:
    """Answer 503, as SQS does when it is not available."""
    return http_error(503, "ServiceUnavailable", **rule)


def throttled(**rule: Any) -> Fault:
    """Answer as SQS does when there are too many requests."""
    return http_error(400, "ThrottlingException", sender_fault=True, **rule)


def expired_token(**rule: Any) -> Fault:
    """Answer as AWS does when the session token has expired."""
    return http_error(403, "ExpiredToken", sender_fault=True, **rule)


def drop_before(**rule: Any) -> Fault:
    """Close the connection. SQS does not get the request."""
    return Fault(kind="drop-before", **rule)


def drop_after(**rule: Any) -> Fault:
    """Close the connection after SQS has carried out the request, so the response is lost."""
    return Fault(kind="drop-after", **rule)


def delayed(seconds: float, **rule: Any) -> Fault:
    """Hold the response back for some seconds. SQS carries out the request at once."""
    return Fault(kind="delay", seconds=seconds, **rule)


def failed_entries(
    *positions: int, code: str = "InternalError", sender_fault: bool = False, **rule: Any
) -> Fault:
    """Report entries of a batch as ``Failed``. SQS gets only the other entries."""
    return Fault(
        kind="fail-entries", positions=positions, code=code, sender_fault=sender_fault, **rule
    )


@dataclass
class Count:
    """How often the proxy has seen one action."""

    calls: int = 0
    #: The entries of the batch calls.
    entries: int = 0
    #: The messages that ReceiveMessage has returned.
    messages: int = 0
    #: The calls that failed because of a rule. They also count in ``calls``.
    faults: int = 0


@dataclass
class Rule:
    """A fault in the proxy. ``times_left`` is the number of calls that it still lets fail."""

    fault: Fault
    rng: random.Random = field(init=False)
    times_left: float = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.fault.seed)
        self.times_left = float("inf") if self.fault.times is None else self.fault.times

    def spoils(
        self, action: str, entries: Sequence[Mapping[str, Any]], queue: str = ""
    ) -> set[int] | None:
        """Return the positions of the entries that must fail, or None if the call passes.

        If the whole call must fail, the set of positions is empty.
        """
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
    """Controls a running proxy. ``endpoint`` is its URL for SQS clients."""

    def __init__(self, endpoint: str, control: str) -> None:
        self.endpoint = endpoint
        self._control = control

    def counts(self) -> dict[str, Count]:
        """Return the counts by action since the last :meth:`reset`. They are 0 without calls."""
        seen = {action: Count(**count) for action, count in self._call("GET", "counts").items()}
        return _ZeroByDefault(seen)

    def reset(self) -> None:
        """Forget counts and recorded requests. Rules and latency stay."""
        self._call("POST", "reset")

    def inject(self, *faults: Fault) -> None:
        """Add rules after the rules that the proxy already has."""
        self._call("POST", "faults", [asdict(fault) for fault in faults])

    def heal(self, queue: str = "") -> None:
        """Drop all rules, and accept connections again.

        With the URL of a queue, drop only the rules for this queue.
        """
        self._call("POST", "heal", queue)

    def set_latency(self, milliseconds: float) -> None:
        """Add a delay to each call before it is forwarded."""
        self._call("POST", "latency", milliseconds)

    def unreachable(self, seconds: float | None = None) -> None:
        """Cut all connections and refuse new ones, for some seconds or until :meth:`heal`."""
        self._call("POST", "unreachable", seconds)

    def record(self, *actions: str) -> None:
        """Record future requests of these actions, and of no others."""
        self._call("POST", "record", actions)

    def requests(self, action: str) -> list[dict[str, Any]]:
        """Return the parsed bodies of an action's recorded requests, oldest first.

        The proxy keeps the last 10,000 requests of all actions together.
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
    """Run a proxy in front of the SQS at ``upstream``, in a child process.

    With ``sign`` it signs the requests that it forwards for AWS. See :mod:`tests.support.signing`.
    """
    options = ("--latency-ms", str(latency_ms), *(["--sign"] if sign else []))
    with (
        tempfile.TemporaryDirectory(prefix="fault-proxy-") as directory,
        running(__name__, upstream, *options, output=Path(directory, "output")) as proxy,
    ):
        yield proxy


@contextmanager
def running(module: str, upstream: str, *options: str, output: Path) -> Iterator[FaultProxy]:
    """Run a module as a proxy. It prints its URLs to the file ``output``."""
    # With one of these variables aiohttp is strict. It then refuses moto's responses, which have
    # two Server headers.
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
    from . import fault_proxy_server  # imports aiohttp, which a worker of a test does not need

    fault_proxy_server.main()

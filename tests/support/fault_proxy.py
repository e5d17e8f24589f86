"""A proxy in front of an SQS endpoint that counts the calls, and makes chosen ones go wrong.

It runs in a process of its own, so that what it measures does not share its interpreter::

    with fault_proxy(upstream) as proxy:
        proxy.inject(unavailable(actions=("DeleteMessageBatch",), times=1))
        ...  # talk to proxy.endpoint
        assert proxy.counts()["DeleteMessageBatch"].calls == 2

``python -m tests.support.fault_proxy --upstream URL`` runs it by hand and prints its two URLs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .faults import (
    Count,
    Fault,
    delayed,
    drop_after,
    drop_before,
    expired_token,
    failed_entries,
    http_error,
    throttled,
    unavailable,
)
from .processes import eventually, stop

__all__ = [
    "Count",
    "Fault",
    "FaultProxy",
    "delayed",
    "drop_after",
    "drop_before",
    "expired_token",
    "failed_entries",
    "fault_proxy",
    "http_error",
    "throttled",
    "unavailable",
]


class FaultProxy:
    """A running proxy. ``endpoint`` is what an SQS client talks to."""

    def __init__(self, endpoint: str, control: str) -> None:
        self.endpoint = endpoint
        self._control = control

    def counts(self) -> dict[str, Count]:
        """What was seen since the last :meth:`reset`; an action never called counts zero."""
        seen = {action: Count(**count) for action, count in self._call("GET", "counts").items()}
        return _ZeroByDefault(seen)

    def reset(self) -> None:
        """Forget counts and records; rules and latency stay."""
        self._call("POST", "reset")

    def inject(self, *faults: Fault) -> None:
        """Add rules behind those there are."""
        self._call("POST", "faults", [asdict(fault) for fault in faults])

    def heal(self, queue: str = "") -> None:
        """Drop all rules, or those of the queue with this URL, and be reachable."""
        self._call("POST", "heal", queue)

    def set_latency(self, milliseconds: float) -> None:
        """Add a delay to each call before it is forwarded."""
        self._call("POST", "latency", milliseconds)

    def unreachable(self, seconds: float | None = None) -> None:
        """Refuse connections and cut those there are, for some seconds or until :meth:`heal`."""
        self._call("POST", "unreachable", seconds)

    def record(self, *actions: str) -> None:
        """Keep the requests of these actions (and of no others) from now on."""
        self._call("POST", "record", actions)

    def requests(self, action: str) -> list[dict[str, Any]]:
        """The parsed bodies kept for an action, oldest first; at most 10,000 in all."""
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

    With ``sign`` it signs what it forwards anew, for AWS; see :mod:`tests.support.signing`.
    """
    # With these aiohttp reads strictly, and refuses moto's answers for their two Server headers.
    strict = {"PYTHONDEVMODE", "PYTHONASYNCIODEBUG"}
    with tempfile.TemporaryDirectory(prefix="fault-proxy-") as directory:
        output = Path(directory) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", __name__),
                    *("--upstream", upstream, "--latency-ms", str(latency_ms)),
                    *(["--sign"] if sign else []),
                ],
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

"""A fake mail provider on this machine. It fails as real providers do, and counts its calls.

``python -m example_project.provider`` prints two addresses as a line of JSON. The first takes
mails: ``POST /mails`` with an ``id``. The second controls the provider, and always answers: ``GET
/`` shows the counts, ``GET /calls`` each call and ``GET /sent`` each mail, and ``POST {"mode":
"up"}`` changes how the provider behaves.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Mode(str, Enum):
    """How the provider behaves."""

    UP = "up"
    #: It answers 503 to every call.
    DOWN = "down"
    #: It answers 401 to every call, as for a revoked API key.
    UNAUTHORIZED = "unauthorized"
    #: It refuses connections, and counts no call.
    REFUSING = "refusing"
    #: It sends the mail, and answers after ``slowness_seconds``.
    SLOW = "slow"
    #: It sends the mail, and never answers.
    SILENT = "silent"


@dataclass
class Behaviour:
    """A mode and its settings."""

    mode: Mode = Mode.UP
    #: It answers 429 to calls above this number in any second. None means no limit.
    calls_per_second: int | None = None
    #: The Retry-After header of a 429.
    retry_after_seconds: int = 1
    slowness_seconds: float = 1.0

    def __post_init__(self) -> None:
        self.mode = Mode(self.mode)


class Provider:
    """Decides how to answer each call, and remembers the calls. Many threads may call it.

    Times are seconds since the epoch.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._behaviour = Behaviour()
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: list[tuple[float, int]] = []  # time and status of each call
        self._mails: Counter[Any] = Counter()  # how often each mail was sent, by its ID
        self._accepted: deque[float] = deque()  # times of calls in the last second without a 429

    def behave(self, behaviour: Behaviour) -> None:
        """Change how the provider behaves, from the next call on."""
        with self._lock:
            self._behaviour = behaviour
            self._accepted.clear()

    def take(self, mail_id: Any) -> tuple[HTTPStatus, Behaviour]:
        """Take one call, and return the status to answer and the behaviour at this moment."""
        with self._lock:
            now, behaviour = self._clock(), self._behaviour
            status = self._judge(now, behaviour)
            self._calls.append((now, status))
            if status == HTTPStatus.OK:
                self._mails[mail_id] += 1
            return status, behaviour

    def report(self) -> dict[str, Any]:
        with self._lock:
            return {
                "mode": self._behaviour.mode.value,
                "calls": len(self._calls),
                "mails": len(self._mails),
                "duplicates": self._mails.total() - len(self._mails),
                "first_call_at": self._calls[0][0] if self._calls else None,
            }

    def calls(self) -> list[tuple[float, int]]:
        with self._lock:
            return list(self._calls)

    def sent(self) -> list[Any]:
        """Return the IDs of all mails that were sent, each once."""
        with self._lock:
            return list(self._mails)

    def _judge(self, now: float, behaviour: Behaviour) -> HTTPStatus:
        if behaviour.mode is Mode.DOWN:
            return HTTPStatus.SERVICE_UNAVAILABLE
        if behaviour.mode is Mode.UNAUTHORIZED:
            return HTTPStatus.UNAUTHORIZED
        if behaviour.calls_per_second is not None:
            while self._accepted and self._accepted[0] <= now - 1:
                self._accepted.popleft()
            if len(self._accepted) >= behaviour.calls_per_second:
                return HTTPStatus.TOO_MANY_REQUESTS
            self._accepted.append(now)
        return HTTPStatus.OK


class Handler(BaseHTTPRequestHandler):
    """Reads and writes JSON, and logs nothing."""

    def body(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return content

    def answer(self, status: HTTPStatus, content: Any, **headers: str) -> None:
        payload = json.dumps(content).encode() + b"\n"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: Any) -> None:
        pass


class MailHandler(Handler):
    """Takes mails."""

    def __init__(self, provider: Provider, *args: Any) -> None:
        self.provider = provider
        super().__init__(*args)

    def do_POST(self) -> None:
        status, behaviour = self.provider.take(self.body()["id"])
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            self.answer(status, {}, Retry_After=str(behaviour.retry_after_seconds))
            return
        if behaviour.mode is Mode.SILENT:
            self.rfile.read(1)  # returns when the caller closes the connection
            return
        if behaviour.mode is Mode.SLOW:
            time.sleep(behaviour.slowness_seconds)
        self.answer(status, {})


class ControlHandler(Handler):
    """Lets the demo decide how the provider behaves, and read its counts."""

    def __init__(self, server: ProviderServer, *args: Any) -> None:
        self.provider_server = server
        super().__init__(*args)

    def do_GET(self) -> None:
        provider = self.provider_server.provider
        pages = {"/": provider.report, "/calls": provider.calls, "/sent": provider.sent}
        if page := pages.get(self.path):
            self.answer(HTTPStatus.OK, page())
        else:
            self.answer(HTTPStatus.NOT_FOUND, {"error": f"there are {', '.join(pages)}"})

    def do_POST(self) -> None:
        try:
            self.provider_server.behave(Behaviour(**self.body()))
        except (TypeError, ValueError) as exc:
            self.answer(HTTPStatus.BAD_REQUEST, {"error": str(exc)})
        else:
            self.answer(HTTPStatus.OK, self.provider_server.provider.report())


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # so that the kernel does not refuse many calls at the same time


class ProviderServer:
    """The provider and its two addresses on 127.0.0.1."""

    def __init__(self, *, port: int = 0, control_port: int = 0) -> None:
        self.provider = Provider()
        self._mails: Listener | None = self._open(port)
        self._port = self._mails.server_port
        self._control = Listener(("127.0.0.1", control_port), partial(ControlHandler, self))
        self.url = f"http://127.0.0.1:{self._port}"
        self.control_url = f"http://127.0.0.1:{self._control.server_port}"

    def behave(self, behaviour: Behaviour) -> None:
        """Change how the provider behaves. To refuse connections, close the listener."""
        self.provider.behave(behaviour)
        if behaviour.mode is Mode.REFUSING:
            self._shut()
        elif self._mails is None:
            self._mails = self._open(self._port)

    def serve_forever(self) -> None:
        """Serve in this thread, until it is interrupted."""
        try:
            self._control.serve_forever()
        finally:
            self._control.server_close()
            self._shut()

    def _open(self, port: int) -> Listener:
        listener = Listener(("127.0.0.1", port), partial(MailHandler, self.provider))
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        return listener

    def _shut(self) -> None:
        if self._mails is not None:
            self._mails.shutdown()
            self._mails.server_close()
            self._mails = None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m example_project.provider", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port for mails; default: a free one")
    parser.add_argument(
        "--control-port",
        type=int,
        default=0,
        help="port to control the provider; default: a free one",
    )
    options = parser.parse_args()
    server = ProviderServer(port=options.port, control_port=options.control_port)
    print(json.dumps({"url": server.url, "control_url": server.control_url}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

"""The example's workflow (account, fundings, ledger), ended at any line, on PostgreSQL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from .stores import postgresql_database, require

#: After each change outside. ``every-line``: at each line, the long form (`make simulate-safe`).
ENDED_AT = os.environ.get("WORKFLOW_ENDED_AT", "every-change")

#: The long form takes a minute on an idle machine, and more than five on one that is busy.
_AT_MOST_SECONDS = 1800 if ENDED_AT == "every-line" else 280


class Bank:
    """Does a request once per idempotency key; refuses to release 666."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, str]] = {}
        self.accounts: dict[str, str] = {}
        self.done: list[tuple[str, str, str]] = []
        self._lock = threading.Lock()

    def ask(self, what: str, key: str, body: dict[str, str]) -> dict[str, str] | None:
        with self._lock:
            if key not in self.answers:
                if body.get("amount") == "666.00":
                    return None
                self.answers[key] = self._do(what, f"{what}-{len(self.answers)}", body)
            return self.answers[key]

    def _do(self, what: str, number: str, body: dict[str, str]) -> dict[str, str]:
        if what == "accounts":
            customer = self.accounts[number] = body["customer"]
            self.done.append((customer, "account", ""))
            return {"account": number}
        if what == "releases":
            customer = self.accounts[number] = self.accounts[body["account"]]
            self.done.append((customer, "release", body["amount"]))
            return {"reference": number}
        self.done.append((self.accounts[body["reference"]], "return", ""))
        return {}

    def of(self, customer: str) -> list[list[str]]:
        return [[what, amount] for whose, what, amount in self.done if whose == customer]


@pytest.fixture
def bank_url() -> Iterator[str]:
    bank = Bank()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(bank.of(self.path[1:].replace("-", " ")))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = bank.ask(self.path[1:], self.headers["Idempotency-Key"], body)
            self._answer(answer or {}, 200 if answer is not None else 422)

        def _answer(self, answer: Any, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(bank_url: str, mode: str) -> list[dict[str, Any]]:
    require("postgresql")
    with postgresql_database() as database:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.integration.safe_workflow", database, bank_url, mode],
            check=False,
            capture_output=True,
            text=True,
            timeout=_AT_MOST_SECONDS,
        )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_a_workflow_that_is_ended_at_any_line_is_finished_by_its_next_run(bank_url: str) -> None:
    """One account, each funding released once, no ledger entry left pending."""
    runs = run(bank_url, ENDED_AT)
    lines = {run["at"] for run in runs}
    assert {line.partition(":")[0] for line in lines} >= {"workflow.py", "tasks.py", "document.py"}
    assert len(runs) > (60 if ENDED_AT == "every-line" else 20)
    for one in runs:
        assert one["code"] == 0, one
        assert one["bank"] == [["account", ""], ["release", "100.00"], ["release", "200.00"]], one
        assert one["account"], one
        assert one["entries"] == ["posted", "posted"], one
    assert runs[-1]["at"] == "the end"


def test_a_funding_that_the_bank_refuses_takes_back_what_was_released(bank_url: str) -> None:
    [one] = run(bank_url, "refused")
    assert one["codes"] == [1, 1]
    assert one["bank"] == [["account", ""], ["release", "100.00"], ["return", ""]]
    assert one["entries"] == ["cancelled", "cancelled"]

"""The workflow of the example project survives a kill after each of its changes outside.

These are requests to a bank and writes to PostgreSQL. It proves the rows W1, W2 and W6 of
``tests/field-stories.md``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.support.http_faults import answer, http_faults

from .stores import postgresql_database, require


class Bank:
    """A bank that does a request once for each idempotency key. It refuses to release 666.00."""

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
def bank_url():
    bank = Bank()

    def behave(handler):
        found = bank.of(handler.path[1:])
        if handler.command == "POST":
            key, body = handler.headers["Idempotency-Key"], json.loads(handler.body)
            found = bank.ask(handler.path[1:], key, body)
        status = 422 if found is None else 200
        answer(status, json.dumps(found).encode())(handler)

    with http_faults() as server:
        server.behave = behave
        yield server.url


def run(bank_url: str, customer: str) -> list[dict[str, Any]]:
    require("postgresql")
    with postgresql_database() as database:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.integration.safe_workflow", database, bank_url, customer],
            check=False,
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.story("W1", "W6")
def test_killed(bank_url):
    """If a workflow's process is killed, the next run finishes the workflow.

    The bank then has one account, and has released each funding once. The database has an entry for
    each release.
    """
    runs = run(bank_url, "killed")
    assert len(runs) > 20
    for one in runs:
        assert one["code"] == 0, one
        assert one["bank"] == [["account", ""], ["release", "100.00"], ["release", "200.00"]], one
        assert one["account"], one
        assert one["entries"] == ["posted", "posted"], one


@pytest.mark.story("W2")
def test_refused(bank_url):
    """If the bank refuses a funding, the releases before it are undone.

    This also holds if the process is killed while it undoes them.
    """
    for one in run(bank_url, "refused"):
        assert one["bank"] == [["account", ""], ["release", "100.00"], ["return", ""]], one
        assert one["entries"] == ["cancelled"], one

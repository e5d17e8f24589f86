"""The tasks in docs/run-twice.md and docs/workflows.md do what these pages say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from celery import _state

from celery_sqs_backoff.store.memory import MemoryStore
from tests.unit.test_docs import python_of

DOCS = Path(__file__).parents[2] / "docs"


class Provider:
    """A fake provider that does a request once per idempotency key.

    ``loses_answers`` says how many of its next answers get lost.
    """

    def __init__(self) -> None:
        self.done: dict[str, tuple[str, Any]] = {}
        self.asked = 0
        self.loses_answers = 0

    def post(self, url: str, *, json: Any, headers: Any, timeout: float) -> Any:
        self.asked += 1
        what = self.done.setdefault(headers["Idempotency-Key"], (url.rpartition("/")[2], json))
        if self.loses_answers:
            self.loses_answers -= 1
            raise requests.ReadTimeout
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: {"id": what[0]})

    def names(self) -> list[str]:
        return [name for name, _ in self.done.values()]


@pytest.fixture
def provider(monkeypatch):
    provider = Provider()
    monkeypatch.setattr(requests, "post", provider.post)
    return provider


@pytest.fixture
def page(request, provider, monkeypatch):
    # The page's tasks are shared, so Celery would define them on the apps of all later tests too.
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    monkeypatch.setattr(_state._tls, "current_app", _state._tls.current_app)
    names = {"__name__": "page"}
    path = DOCS / request.param
    exec(compile(python_of(path), str(path), "exec"), names)
    app = names["app"]
    app.conf.update(
        broker_url="memory://", task_always_eager=True, sqs_backoff={"store": MemoryStore()}
    )
    yield names
    app.close()


@pytest.mark.parametrize("page", ["run-twice.md"], indirect=True)
def test_welcome(page):
    """The page's task sends a customer one mail an hour. A second message is ignored."""
    welcome = page["welcome"]
    for message in ("1", "1"):
        assert welcome.apply((7,), task_id=message).get() == "sent"
    assert welcome.apply((7,), task_id="2").state == "IGNORED"
    assert welcome.apply((8,), task_id="3").get() == "sent"


@pytest.mark.parametrize("page", ["run-twice.md"], indirect=True)
def test_charge_once(page, provider):
    """If the answer to a charge is lost, the page's task asks again under the same key."""
    charge = page["charge_once"]
    provider.loses_answers = 1
    assert charge.apply((9, 100), task_id="1").state == "FAILURE"  # an eager run is not retried
    for _ in range(2):
        assert charge.apply((9, 100), task_id="1").get() == "charges"
    assert (provider.names(), provider.asked) == (["charges"], 2)
    assert charge.apply((9, 250), task_id="1").state == "FAILURE", "the step had another amount"


@pytest.mark.parametrize("page", ["workflows.md"], indirect=True)
def test_open_account(page, provider, monkeypatch):
    """The page's workflow makes each call once, and confirms only a call that has succeeded."""
    confirmed = []
    taken_back = []
    page["post_entry"].run = lambda released: confirmed.append(released)
    page["take_back"].run = lambda released, key: taken_back.append((released, key))
    open_account = page["open_account"]
    for _ in range(2):
        assert open_account.apply((7,), task_id="1").state == "SUCCESS"
    assert (provider.names(), provider.asked) == (["accounts", "releases"], 2)
    assert (confirmed, taken_back) == (["releases"], [])
    provider.loses_answers = 10
    assert open_account.apply((8,), task_id="2").state == "FAILURE"
    assert len(confirmed) == 1

"""What runs now, by Celery's own account."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_sqs_backoff.worker.observation import running

URL = "https://sqs.eu-central-1.amazonaws.com/1/"


class Request:
    """As Celery's: known by itself, weakly."""

    def __init__(self, url: str | None) -> None:
        info = {} if url is None else {"sqs_queue": url}
        self.message = SimpleNamespace(delivery_info=info)


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    requests: set[Any] = set()
    monkeypatch.setattr(state, "active_requests", requests)
    return requests


def test_tasks_that_run_are_counted_by_queue(active: set[Any]) -> None:
    active |= {Request(URL + "mails"), Request(URL + "mails"), Request(URL + "bulk"), Request(None)}
    assert (running("mails"), running("bulk"), running("other")) == (2, 1, 0)


def test_a_set_that_changes_meanwhile_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changing:
        looks = 0

        def __iter__(self) -> Iterator[Any]:
            self.looks += 1
            if self.looks < 3:
                raise RuntimeError("Set changed size during iteration")
            return iter([Request(URL + "mails")])

    monkeypatch.setattr(state, "active_requests", Changing())
    assert running("mails") == 1

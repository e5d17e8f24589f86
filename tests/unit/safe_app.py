"""An app, a counted store and eager messages for the tests of the safe parts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from celery import Celery

from celery_sqs_backoff.safe import StoreUnavailable
from celery_sqs_backoff.store.memory import MemoryStore


class CountedStore(MemoryStore):
    """Counts its calls, and may be away: for all of them, or for some by name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: Counter[str] = Counter()
        self.is_away: bool | set[str] = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("add", "get", "replace", "delete"):
            self.calls[name] += 1
            if self.is_away is True or (self.is_away and name in self.is_away):
                raise StoreUnavailable("away")
        return super().__getattribute__(name)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def make_app(**settings: Any) -> Celery:
    app = Celery("safe", broker="memory://", set_as_current=False)
    app.finalize()
    app.conf.update(
        task_always_eager=True,
        sqs_backoff={"store": CountedStore(), "secret": "test", **settings},
    )
    return app


def store_of(app: Celery) -> CountedStore:
    store: CountedStore = app.conf.sqs_backoff["store"]
    return store

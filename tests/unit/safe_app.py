"""An eager app with a store that counts its calls, for the tests of guards and workflows."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from celery import Celery

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.safe import StoreUnavailable
from celery_sqs_backoff.store.memory import MemoryStore


class CountedStore(MemoryStore):
    """A store in memory that counts the calls of each method.

    ``is_away`` makes all methods raise, or those that it names.
    """

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


def bare_app(name: str) -> Celery:
    """Return an app whose tasks have our base class and are not shared with other apps."""
    app = Celery(name, broker="memory://", set_as_current=False)
    app.finalize()
    app.task = partial(app.task, shared=False, base=SQSBackoffTask)
    return app


def make_app(**settings: Any) -> Celery:
    app = bare_app("safe")
    app.conf.update(
        task_always_eager=True,
        sqs_backoff={"store": CountedStore(), "secret": "test", **settings},
    )
    return app


def store_of(app: Celery) -> CountedStore:
    store: CountedStore = app.conf.sqs_backoff["store"]
    return store

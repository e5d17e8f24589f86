"""A pool process that is told to end while it counts a part of a chord has run that part once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from celery import chord
from celery.backends.base import KeyValueStoreBackend
from redis import Redis

from celery_sqs_backoff import SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import REDIS, Stage, app_of_this_module

pytestmark = pytest.mark.redis

app = app_of_this_module()

#: The first to count a part of this chord is told to end.
_DEADLY = "celery-sqs-backoff-test-deadly-chord"


class CountingBackend(KeyValueStoreBackend):  # type: ignore[misc]  # Celery is not typed
    """Counts the parts of a chord by a number, as those for DynamoDB, GCS and Memcached do."""

    implements_incr = True
    key_t = str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._redis = Redis.from_url(REDIS)

    def get(self, key: Any) -> Any:
        return self._redis.get(key)

    def set(self, key: Any, value: Any) -> None:
        self._redis.set(key, value, ex=600)

    def delete(self, key: Any) -> None:
        self._redis.delete(key)

    def incr(self, key: Any) -> Any:
        count = self._redis.incr(key)
        if self._redis.delete(_DEADLY):
            os.kill(os.getpid(), signal.SIGTERM)
        return count


@app.task(base=SQSBackoffTask, name="chord_parts.part")
def part(number: int) -> int:
    note(task="chord_parts.part", number=number)
    return number


@app.task(base=SQSBackoffTask, name="chord_parts.body")
def body(numbers: list[int]) -> int:
    note(task="chord_parts.body", numbers=numbers)
    return sum(numbers)


def test_a_part_that_is_counted_does_not_run_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(conf={"result_backend": f"{__name__}:CountingBackend"})
    queue = stage.queues[0].name
    Redis.from_url(REDIS).set(_DEADLY, 1, ex=60)
    header = [
        stage.app.signature("chord_parts.part", (number,), queue=queue) for number in range(3)
    ]
    with stage.worker(concurrency=2):
        result = chord(header, app=stage.app)(stage.app.signature("chord_parts.body", queue=queue))
        eventually(result.ready, timeout=30)
        stage.wait_until_settled()
    assert not Redis.from_url(REDIS).exists(_DEADLY)
    assert [run["numbers"] for run in stage.runs("chord_parts.body")] == [[0, 1, 2]]
    assert sorted(run["number"] for run in stage.runs("chord_parts.part")) == [0, 1, 2]

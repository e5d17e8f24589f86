"""Which store a setting names, and what is refused."""

from __future__ import annotations

import re

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff.store.dynamodb import DynamoDBStore
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.protocol import key_of
from celery_sqs_backoff.store.urls import check_store, has_store, open_store, store_of


def test_an_app_without_a_store_is_told_how_to_name_one() -> None:
    app = Celery(set_as_current=False)
    assert not has_store(app)
    with pytest.raises(ImproperlyConfigured, match=r"sqs_backoff\['store'\]"):
        store_of(app)


@pytest.mark.parametrize("named", ["postgres://h/d", "", "redi", 7, ["redis://"]])
def test_what_is_no_store_is_refused(named: object) -> None:
    with pytest.raises(ImproperlyConfigured, match="memory://"):
        check_store(named)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ImproperlyConfigured) as refused:
        open_store("mysql://root:secret@host/")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("dynamodb://", "no table"),
        ("dynamodb://t?regoin=x", "regoin"),
        ("dynamodb://t?clock_skew_seconds=soon", "number"),
    ],
)
def test_a_url_that_says_too_little_or_too_much_is_refused(url: str, why: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=why):
        open_store(url)


def test_dynamodb_refuses_a_negative_clock_skew() -> None:
    with pytest.raises(ValueError, match="clock_skew_seconds"):
        DynamoDBStore("t", clock_skew_seconds=-1, client=object())


def test_one_url_is_one_store() -> None:
    assert open_store("memory://a") is open_store("memory://a")
    assert open_store("memory://a") is not open_store("memory://b")


def test_a_store_of_ones_own_is_taken_as_it_is() -> None:
    store = MemoryStore()
    app = Celery(set_as_current=False)
    app.conf.sqs_backoff = {"store": store}
    assert store_of(app) is store


def test_keys_are_hashed_and_never_ambiguous() -> None:
    assert key_of("step", "a:b", "c") != key_of("step", "a", "b:c")
    assert key_of("step", "x" * 300) != key_of("step", "x" * 301)
    assert key_of("step", "cus_A") != key_of("step", "cus_a")
    assert re.fullmatch("step:[0-9a-f]{64}", key_of("step", "é" * 300))


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa/ss@host:6379/0",
        "redis://:1234/ss@host:6379/0",
        "redis://:pa/ss@host:6379",
        "rediss://me:secr/et@host/0",
    ],
)
def test_a_password_with_a_slash_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="percent-encoded") as refused:
        check_store(url)
    shown = str(refused.value) + repr(refused.value.__cause__)
    assert not any(part in shown for part in ("pa/", "ss@", "1234", "'pa'", "secr/", "et@"))
    assert refused.value.__context__ is None or refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://127.0.0.1:notaport/0", "port"),
        ("redis:/127.0.0.1", "redis URL"),
        ("redis://127.0.0.1/zero", "number"),
        ("unix://x", "socket"),
        ("dynamodb://", "no table"),
        ("dynamodb://t?clock_skew=5", "clock_skew"),
    ],
)
def test_a_bad_url_is_refused_when_a_task_is_bound(url: str, why: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=why):
        check_store(url)


def test_an_unknown_option_in_a_redis_url_is_refused_without_showing_the_url() -> None:
    with pytest.raises(ImproperlyConfigured, match="redis URL") as refused:
        open_store("redis://:secret@127.0.0.1/0?colour=red")
    assert "secret" not in str(refused.value)


def test_memory_forgets_what_has_ended() -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    for n in range(1500):
        store.add(str(n), "value", 1)
        now[0] += 1
    assert len(store._records) < 1000

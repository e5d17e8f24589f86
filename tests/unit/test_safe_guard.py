"""Check-and-set, unset, and the task option."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff.safe.errors import Refused
from celery_sqs_backoff.safe.guard import Guard, check_and_set, unset
from celery_sqs_backoff.safe.stores.memory import MemoryStore


def send_mail(customer_id: int, template: str = "welcome") -> None: ...


SIGNATURE = inspect.signature(send_mail)


def test_the_same_message_passes_and_another_does_not() -> None:
    store = MemoryStore()
    check_and_set(store, "mail:7", "first", 3600)
    check_and_set(store, "mail:7", "first", 3600)
    with pytest.raises(Refused) as refused:
        check_and_set(store, "mail:7", "second", 3600)
    assert refused.value.result["passed"] == "first"
    assert "3600 s" in str(refused.value)
    check_and_set(store, "mail:8", "second", 3600)


def test_another_message_passes_after_the_window_which_the_same_one_does_not_extend() -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    check_and_set(store, "mail:7", "first", 3600)
    now[0] = 3599
    check_and_set(store, "mail:7", "first", 3600)
    now[0] = 3600
    check_and_set(store, "mail:7", "second", 3600)


def test_unset_takes_back_ones_own_record_only() -> None:
    store = MemoryStore()
    check_and_set(store, "mail:7", "first", 3600)
    assert not unset(store, "mail:7", "second")
    assert unset(store, "mail:7", "first")
    check_and_set(store, "mail:7", "second", 3600)
    assert not unset(store, "mail:7", "first")


@pytest.mark.parametrize(
    ("args", "kwargs", "key"),
    [((7,), {}, "7 welcome"), ((), {"customer_id": 7, "template": "bill"}, "7 bill")],
)
def test_a_key_is_made_of_the_arguments(args: Any, kwargs: Any, key: str) -> None:
    guard = Guard(key="{customer_id} {template}", window=1)
    assert guard.key_for(SIGNATURE, args, kwargs) == key
    called = Guard(
        key=lambda customer_id, template="welcome": f"{customer_id} {template}", window=1
    )
    assert called.key_for(SIGNATURE, args, kwargs) == key


def test_a_key_may_look_into_an_argument() -> None:
    guard = Guard(key="{order[id]}", window=1)
    signature = inspect.signature(lambda order: None)
    guard.check(signature)
    assert guard.key_for(signature, ({"id": 3},), {}) == "3"


def test_an_argument_that_the_task_does_not_have_is_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="customer_id, template"):
        Guard(key="mail:{costumer_id}", window=1).check(SIGNATURE)


@pytest.mark.parametrize("window", [0, -1, None, "1h", float("inf")])
def test_a_window_must_be_above_0(window: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="window"):
        Guard(key="a", window=window)


@pytest.mark.parametrize("key", ["", None, 7])
def test_a_key_must_be_a_string_or_a_callable(key: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="key"):
        Guard(key=key, window=1)


def test_a_window_may_be_a_timedelta() -> None:
    assert Guard(key="a", window=timedelta(hours=1)).window == 3600

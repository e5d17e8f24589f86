"""Check-and-set, unset, and the task option."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_sqs_backoff.safe.errors import OtherInput, Refused
from celery_sqs_backoff.safe.guard import Guard, Run, enter, finish, unset
from celery_sqs_backoff.store.memory import MemoryStore
from celery_sqs_backoff.store.vault import Vault


def send_mail(customer_id: int, template: str = "welcome") -> None: ...


SIGNATURE = inspect.signature(send_mail)


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def vault(now: list[float]) -> Vault:
    return Vault(MemoryStore(clock=lambda: now[0]), namespace="shop")


def run(message: str, number: int = 1, given: str = "") -> Run:
    return Run(message, f"{message} run {number}", given)


def test_the_same_message_passes_and_another_does_not(vault: Vault) -> None:
    assert enter(vault, "mail:7", run("first"), 3600).is_ours
    assert not enter(vault, "mail:7", run("first", 2), 3600).is_ours
    with pytest.raises(Refused) as refused:
        enter(vault, "mail:7", run("second"), 3600)
    assert "3600 s" in str(refused.value)
    assert enter(vault, "mail:8", run("second"), 3600).is_ours


def test_a_refusal_does_not_say_who_has_passed(vault: Vault) -> None:
    """Whoever knows the id could send a message under it, and pass."""
    enter(vault, "mail:7", run("first"), 3600)
    with pytest.raises(Refused) as refused:
        enter(vault, "mail:7", run("second"), 3600)
    assert "first" not in repr(refused.value.result)


def test_another_message_passes_after_the_window_which_the_same_one_does_not_extend(
    vault: Vault, now: list[float]
) -> None:
    enter(vault, "mail:7", run("first"), 3600)
    now[0] = 3599
    finish(vault, enter(vault, "mail:7", run("first", 2), 3600), "sent")
    now[0] = 3600
    enter(vault, "mail:7", run("second"), 3600)


def test_only_the_run_that_made_the_record_unsets_it(vault: Vault) -> None:
    first = enter(vault, "mail:7", run("first"), 3600)
    assert unset(vault, first)
    second = enter(vault, "mail:7", run("second"), 3600)
    assert not unset(vault, first)
    assert unset(vault, second)


def test_no_run_unsets_what_another_run_of_its_message_may_have_done(vault: Vault) -> None:
    """The first was lost after it had sent the mail; or it is still going. Nobody knows."""
    first = enter(vault, "mail:7", run("first"), 3600)
    second = enter(vault, "mail:7", run("first", 2), 3600)
    assert not unset(vault, second)
    assert not unset(vault, first)
    with pytest.raises(Refused):
        enter(vault, "mail:7", run("second"), 3600)


def test_a_message_that_comes_back_when_it_is_done_gets_its_result(vault: Vault) -> None:
    finish(vault, enter(vault, "mail:7", run("first"), 3600), {"sent": [1, 2]})
    again = enter(vault, "mail:7", run("first", 2), 3600)
    assert (again.is_done, again.has_result, again.result) == (True, True, {"sent": [1, 2]})
    with pytest.raises(Refused):
        enter(vault, "mail:7", run("second"), 3600)


@pytest.mark.parametrize("result", [object(), "x" * 70_000], ids=["not JSON", "too large"])
def test_a_message_whose_result_cannot_be_kept_is_done_all_the_same(
    vault: Vault, result: object
) -> None:
    finish(vault, enter(vault, "mail:7", run("first"), 3600), result)
    again = enter(vault, "mail:7", run("first", 2), 3600)
    assert (again.is_done, again.has_result) == (True, False)


def test_of_two_runs_of_one_message_the_one_that_ends_well_makes_it_done(vault: Vault) -> None:
    first = enter(vault, "mail:7", run("first"), 3600)
    enter(vault, "mail:7", run("first", 2), 3600)
    finish(vault, first, "sent")
    assert enter(vault, "mail:7", run("first", 3), 3600).result == "sent"


def test_the_same_message_with_other_arguments_is_refused_by_name(vault: Vault) -> None:
    enter(vault, "mail:7", run("first", given="[7]"), 3600)
    with pytest.raises(OtherInput, match="same key, other input"):
        enter(vault, "mail:7", run("first", 2, given="[8]"), 3600)


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


@pytest.mark.parametrize("window", [0, -1, None, "1h", float("inf"), timedelta.max])
def test_a_window_must_be_above_0_and_within_a_century(window: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="window"):
        Guard(key="a", window=window)


@pytest.mark.parametrize("key", ["mail:{customer_id", "mail:{customer_id!z}"])
def test_a_key_that_cannot_be_filled_is_refused(key: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"guard: invalid key 'mail:\{customer_id"):
        Guard(key=key, window=1).check(SIGNATURE)


@pytest.mark.parametrize("key", ["", None, 7])
def test_a_key_must_be_a_string_or_a_callable(key: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="key"):
        Guard(key=key, window=1)


def test_a_window_may_be_a_timedelta() -> None:
    assert Guard(key="a", window=timedelta(hours=1)).window == 3600


@pytest.mark.parametrize(
    ("args", "other"),
    [(("x:y", "z"), ("x", "y:z")), (("x%3A", "y"), ("x:", "y")), (("a ", "b"), ("a", " b"))],
)
def test_the_separators_of_a_key_are_told_from_the_arguments(args: Any, other: Any) -> None:
    signature = inspect.signature(lambda a, b: None)
    for template in ("m:{a}:{b}", "{a} {b}"):
        guard = Guard(key=template, window=1)
        keys = {guard.key_for(signature, given, {}) for given in (args, other)}
        assert len(keys) == 2


@pytest.mark.parametrize("between", ["", "x", "0"])
def test_two_arguments_need_a_separator_between_them(between: str) -> None:
    """``{a}0{b}`` is 1001 for 1 and 01, and for 10 and 1."""
    with pytest.raises(ImproperlyConfigured, match="between"):
        Guard(key=f"{{customer_id}}{between}{{template}}", window=1).check(SIGNATURE)


@pytest.mark.parametrize(("customer", "expected"), [(None, TypeError), ("", ValueError)])
def test_an_argument_that_names_nobody_is_no_key(customer: Any, expected: Any) -> None:
    """Else all customers without a number would be one customer."""
    with pytest.raises(expected, match="customer_id"):
        Guard(key="mail:{customer_id}", window=1).key_for(SIGNATURE, (customer,), {})


@pytest.mark.parametrize("returned", [None, "", ["a"], True])
def test_a_callable_must_return_a_key(returned: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="guard key"):
        Guard(key=lambda customer_id: returned, window=1).key_for(SIGNATURE, (7,), {})

"""The tenant of a call is an argument of its task."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.provider.tenant import check_key, digest_of, tenant_of


def send(account_id: str, region: str = "eu", *, urgent: bool = False) -> None: ...


def tenant(key: str, *args: Any, **kwargs: Any) -> str:
    return tenant_of(key, send, (args, kwargs))


def test_argument():
    """An argument counts, whether it is given by position or by name."""
    assert tenant("account_id", account_id="a1") == tenant("account_id", "a1") == "a1"
    assert tenant("account_id", 7) == "7"


def test_default():
    """A default counts like a given value."""
    assert tenant("region", "a1") == tenant("region", "a1", "eu") == "eu"
    assert tenant("region", "a1", region="us") == "us"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((None,), {}), ((1, 2, 3), {}), (("a",), {"nobody": 1}), (("a",), {5: 1})],
    ids=repr,
)
def test_call_without_argument(args, kwargs):
    """A call without the argument has no tenant, and neither has one that does not fit the task."""
    assert tenant_of("account_id", send, (args, kwargs)) == ""


@pytest.mark.parametrize("payload", [None, 5, [], {"args": [1]}, ("a", {}), ([], [])], ids=repr)
def test_payload_is_no_call(payload):
    """A payload that is no call has no tenant."""
    assert tenant_of("account_id", send, payload) == ""


def test_long_value():
    """A tenant's value is cut to 500 characters."""
    assert len(tenant("account_id", "a" * 10_000)) == 500


@pytest.mark.parametrize("bind", [False, True])
def test_first_argument(bind):
    """A task's first argument counts by position, with or without ``self``.

    The first argument of a task without ``self`` was taken for ``self``.
    """
    app = Celery("tenants", broker="memory://", set_as_current=False)

    def plain(account_id, parcel_id): ...

    def bound(self, account_id, parcel_id): ...

    options = {"base": SQSBackoffTask, "lazy": False, "shared": False}
    task = app.task(name="book", bind=bind, **options)(bound if bind else plain)
    assert tenant_of("parcel_id", task.run, (("a", 7), {})) == "7"


def test_invalid_key():
    """A key that no call of the task can give is refused."""

    def anything(**kwargs): ...

    check_key("urgent", send)
    check_key("account_id", anything)
    with pytest.raises(ValueError, match="expected one of account_id, region, urgent"):
        check_key("account", send)


def test_callable_without_signature():
    """A callable without a signature has no tenant."""
    assert tenant_of("x", dict, ((1,), {})) == ""
    check_key("x", dict)


def test_digest():
    """A digest does not tell the argument."""
    assert "account-7" not in digest_of("account-7")
    assert digest_of("a") != digest_of("b")

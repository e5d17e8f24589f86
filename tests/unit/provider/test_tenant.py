"""The tenant of a call, from a template of its arguments."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.provider.tenant import Template, digest_of, parameters_of


def send(account_id: str, region: str = "eu", *, urgent: bool = False) -> None: ...


def tenant(template: str, *args: Any, **kwargs: Any) -> str | None:
    return Template(template).tenant(args, kwargs, parameters_of(send))


def test_an_argument_counts_however_it_is_given() -> None:
    by_name = tenant("{account_id}", account_id="a1")
    assert by_name is not None
    assert tenant("{account_id}", "a1") == by_name
    assert tenant("{0}", "a1") == by_name


def test_a_default_counts_as_given() -> None:
    assert tenant("{region}", "a1") == tenant("{region}", "a1", "eu")
    assert tenant("{region}", "a1") != tenant("{region}", "a1", region="us")


@pytest.mark.parametrize("template", ["{account_id}", "{0}", "{nobody}", "{7}"])
def test_a_missing_argument_is_no_tenant(template: str) -> None:
    assert tenant(template) is None


@pytest.mark.parametrize("bind", [False, True])
def test_a_tasks_first_argument_counts_by_position_with_or_without_self(
    bind: bool,
) -> None:
    """The first argument of a task without ``self`` passed for ``self``."""
    app = Celery("tenants", broker="memory://", set_as_current=False)

    def plain(account_id: str, parcel_id: int) -> None: ...

    def bound(self: Any, account_id: str, parcel_id: int) -> None: ...

    options = {"base": SQSBackoffTask, "lazy": False, "shared": False}
    task = app.task(name="book", bind=bind, **options)(bound if bind else plain)
    assert list(parameters_of(task.run)) == ["account_id", "parcel_id"]
    tenant = Template("{parcel_id}").tenant(("a", 7), {}, parameters_of(task.run))
    assert tenant is not None
    assert tenant.endswith("7")


def test_tenants_are_not_mixed_up() -> None:
    assert tenant("{0}-{1}", "a-b", "c") != tenant("{0}-{1}", "a", "b-c")


@pytest.mark.parametrize(
    "text", ["", "account", "{}", "{a.b}", "{a[0]}", "{a!r}", "{a:>10}", "{a", "{a b}"]
)
def test_only_names_in_braces_are_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="key"):
        Template(text)


def test_a_callable_without_a_signature_has_no_parameters() -> None:
    assert parameters_of(dict.fromkeys) is not None
    assert Template("{x}").tenant((1,), {}, {}) is None


def test_a_digest_does_not_tell_the_argument() -> None:
    assert "account-7" not in digest_of("account-7")
    assert digest_of("a") != digest_of("b")

"""``Provider`` refuses nonsense, naming the argument and what it expected."""

from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest

from celery_sqs_backoff.provider import Provider


def test_defaults():
    """The defaults are no rate, automatic recall and a probe every five seconds."""
    provider = Provider("mailgun")
    assert provider.name == "mailgun"
    assert (provider.rate, provider.recall) == (None, None)
    assert provider.probe_interval == 5


def test_value_object():
    """A provider is frozen, hashable and equal by value."""
    assert Provider("a", rate="60/s") == Provider("a", rate=60)
    assert len({Provider("a"), Provider("a")}) == 1
    with pytest.raises(FrozenInstanceError):
        Provider("a").name = "b"


@pytest.mark.parametrize(
    ("rate", "per_second"),
    [("60/s", 60), ("300/m", 5), ("7200/h", 2), ("0.5/s", 0.5), ("3", 3), (3, 3), (None, None)],
)
def test_rates(rate, per_second):
    """A rate is a number of calls per second, or a text with a unit."""
    assert Provider("a", rate=rate).rate == per_second


def test_timedelta():
    """A time may be a ``timedelta``."""
    assert Provider("a", probe_interval=timedelta(seconds=1)).probe_interval == 1


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("name", "", ValueError),
        ("name", 5, TypeError),
        ("failures", 1, ValueError),
        ("failures", 2.5, TypeError),
        ("failures", True, TypeError),
        ("probe_interval", 0, ValueError),
        ("rate", "0/s", ValueError),
        ("rate", "5/x", ValueError),
        ("rate", [], TypeError),
        ("rate", float("nan"), ValueError),
        ("recall", "yes", TypeError),
        ("key", 5, TypeError),
        ("key", "{account}", ValueError),
        ("key", "{a.b}", ValueError),
    ],
)
def test_invalid_argument(name, value, error):
    """An invalid argument is refused by its name."""
    options = {"name": "mailgun", name: value}
    with pytest.raises(error, match=name):
        Provider(**options)

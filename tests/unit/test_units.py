"""Reading and printing rates and durations, such as ``10/s`` and ``36h``."""

from datetime import timedelta

import pytest

from celery_sqs_backoff.units import in_words, parse_duration, parse_rate, spell_duration


@pytest.mark.parametrize(
    ("text", "per_second"),
    [("10/s", 10), ("300/m", 5), ("7200/h", 2), ("10", 10), (2.5, 2.5), (None, None)],
)
def test_rate(text, per_second):
    """A rate is read as in Celery's ``rate_limit``. A number means messages per second."""
    assert parse_rate(text) == per_second


@pytest.mark.parametrize("text", ["0/s", "-1/s", "10/d", "fast", "", "/s", float("inf"), 0, "nan"])
def test_invalid_rate(text):
    """An invalid rate is refused. The error has an example of a valid one."""
    with pytest.raises(ValueError, match=r"invalid rate .*10/s"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("36h", 129_600),
        ("2d", 172_800),
        ("1h30m", 5_400),
        ("1.5h", 5_400),
        ("45", 45),
        (45, 45),
        (timedelta(minutes=1), 60),
        (None, None),
    ],
)
def test_durations(value, seconds):
    """A duration may have units, and a number means seconds."""
    assert parse_duration(value, "ramp") == seconds


@pytest.mark.parametrize("value", ["", "m", "10 minutes", "10x", "-5m", "5m!"])
def test_invalid_duration(value):
    """An invalid duration is refused. The error has the name of its option."""
    with pytest.raises(ValueError, match="invalid ramp"):
        parse_duration(value, "ramp")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (61, "1 min 1 s"), (183_600, "2 d 3 h"), (3600, "1 h"), (-5, "0 s")],
)
def test_spell_duration(seconds, text):
    """A duration is printed with at most two units."""
    assert spell_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (1, "1 second"),
        (30, "30 seconds"),
        (210, "3.5 minutes"),
        (86_400, "24 hours"),
        (345_600, "4 days"),
    ],
)
def test_times_in_words(seconds, words):
    """``in_words`` spells out a time in the largest unit that suits it."""
    assert in_words(seconds) == words

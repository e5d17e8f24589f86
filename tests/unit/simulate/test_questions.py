"""Forecasts and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from celery_sqs_backoff.simulate.engine import simulate
from celery_sqs_backoff.simulate.forecast import Forecast, forecast
from celery_sqs_backoff.simulate.law import STRATEGIES
from celery_sqs_backoff.simulate.results import plot, result_of
from celery_sqs_backoff.simulate.scenario import Scenario, ScenarioError

DEPTH = {
    "ApproximateNumberOfMessages": "100",
    "ApproximateNumberOfMessagesNotVisible": "890",
    "ApproximateNumberOfMessagesDelayed": "10",
    "MessageRetentionPeriod": "345600",
}


def ask(attributes: dict[str, str] = DEPTH, receives: int | None = None, **more: Any) -> Forecast:
    scenario = Scenario(retry_for=6 * 3600.0)
    return forecast(scenario, attributes, max_receive_count=receives, **more)


def test_a_forecast_says_when_the_first_message_gives_up() -> None:
    found = ask()
    assert found.messages == 1000
    assert found.first is not None
    assert 5 * 3600 <= found.first <= 6 * 3600
    assert sum(found.reasons.values()) == 1000
    assert [number for _, number in found.given_up] == sorted(n for _, n in found.given_up)


def test_messages_that_have_waited_give_up_earlier() -> None:
    first = ask(oldest=5 * 3600.0).first
    assert first is not None
    assert first <= 3600


def test_a_forecast_behind_a_gate_knows_how_the_messages_have_waited() -> None:
    """The gate has looked at each a few times. Without one their ten receives are used up."""
    bare = ask(receives=10, oldest=3 * 3600.0)
    gated = ask(receives=10, oldest=3 * 3600.0, strategy="provider")
    assert bare.first is not None
    assert gated.first is not None
    assert bare.first < 60
    assert gated.first > 1800
    assert "the queue's maxReceiveCount was passed" not in {**bare.reasons, **gated.reasons}


def test_a_small_max_receive_count_gives_up_first() -> None:
    found = ask(receives=5)
    assert set(found.reasons) == {"the queue's maxReceiveCount is reached"}
    assert found.first is not None
    assert found.first < 600


def test_an_empty_queue_has_nothing_to_give_up() -> None:
    found = ask({}, receives=5)
    assert (found.messages, found.first) == (0, None)


def test_a_picture_has_a_panel_for_each_strategy(tmp_path: Path) -> None:
    """The suffix of the file says its format."""
    scenario = Scenario(outage=300.0)
    results = [
        result_of(name, scenario, simulate(scenario, STRATEGIES[name])) for name in STRATEGIES
    ]
    plot(results, "mails < all & more", tmp_path / "outage.svg")
    assert (tmp_path / "outage.svg").read_text().count('id="axes_') == 2
    plot(results, "png", tmp_path / "outage.png")
    assert (tmp_path / "outage.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="not supported"):
        plot(results, "text", tmp_path / "outage.text")


def test_a_message_older_than_its_queue_keeps_any_is_refused() -> None:
    attributes = {"MessageRetentionPeriod": "3600", "ApproximateNumberOfMessages": "1"}
    with pytest.raises(ScenarioError, match="keeps its messages for 3600 s"):
        ask(attributes, oldest=3601.0)

"""Forecasts and pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from celery_sqs_backoff.simulate.engine import simulate
from celery_sqs_backoff.simulate.forecast import forecast, scenario_of_queue
from celery_sqs_backoff.simulate.plot import plot, svg
from celery_sqs_backoff.simulate.results import result_of
from celery_sqs_backoff.simulate.scenario import (
    Arrivals,
    Kind,
    Phase,
    Scenario,
    ScenarioError,
    Script,
)
from celery_sqs_backoff.simulate.strategies import STRATEGIES

DEPTH = {
    "ApproximateNumberOfMessages": "100",
    "ApproximateNumberOfMessagesNotVisible": "890",
    "ApproximateNumberOfMessagesDelayed": "10",
    "MessageRetentionPeriod": "345600",
}


def test_a_forecast_says_when_the_first_message_gives_up() -> None:
    scenario = Scenario().with_task(retry_for=6 * 3600.0)
    begun = scenario_of_queue(scenario, DEPTH, max_receive_count=None)
    found = forecast(begun)
    assert found.messages == 1000
    assert found.first is not None
    assert 5 * 3600 <= found.first <= 6 * 3600
    assert sum(found.reasons.values()) == 1000
    assert [number for _, number in found.given_up] == sorted(n for _, n in found.given_up)


def test_messages_that_have_waited_give_up_earlier() -> None:
    scenario = Scenario().with_task(retry_for=6 * 3600.0)
    begun = scenario_of_queue(scenario, DEPTH, max_receive_count=None, oldest=5 * 3600.0)
    first = forecast(begun).first
    assert first is not None
    assert first <= 3600


def test_a_forecast_behind_a_gate_knows_how_the_messages_have_waited() -> None:
    """The gate has looked at each a few times. Without one their ten receives are used up."""
    begun = scenario_of_queue(Scenario(), DEPTH, max_receive_count=10, oldest=3 * 3600.0)
    bare, gated = forecast(begun), forecast(begun, strategy="gate+recall")
    assert bare.first is not None
    assert gated.first is not None
    assert bare.first < 60
    assert gated.first > 1800
    assert "the queue's maxReceiveCount was passed" not in {**bare.reasons, **gated.reasons}


def test_a_small_max_receive_count_gives_up_first() -> None:
    begun = scenario_of_queue(Scenario(), DEPTH, max_receive_count=5)
    found = forecast(begun)
    assert set(found.reasons) == {"the queue's maxReceiveCount is reached"}
    assert found.first is not None
    assert found.first < 600


def test_an_empty_queue_has_nothing_to_give_up() -> None:
    begun = scenario_of_queue(Scenario(), {}, max_receive_count=5)
    assert (forecast(begun).messages, forecast(begun).first) == (0, None)


def test_a_picture_is_svg_with_a_panel_per_strategy_and_all_labels(tmp_path: Path) -> None:
    scenario = Scenario(
        script=Script(phases=(Phase(kind=Kind.OUTAGE, start=0.0, lasts=300.0),)),
        arrivals=Arrivals(lasts=300.0),
    )
    results = [
        result_of(name, scenario, simulate(scenario, STRATEGIES[name]))
        for name in ("full-jitter", "gate+recall")
    ]
    path = tmp_path / "outage.svg"
    plot(results, "mails < all & more", path)
    root = ET.fromstring(path.read_text())
    text = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert text[0] == "mails < all & more"
    assert sum(t.startswith(("full-jitter:", "gate+recall:")) for t in text) == 2
    assert any("turned away: too many" in t for t in text)
    assert len([e for e in root.iter() if e.tag.endswith("polyline")]) >= 4
    height = float(root.attrib["height"])
    assert all(float(e.attrib["y"]) <= height for e in root.iter() if e.tag.endswith("text"))
    plot(results, "png", tmp_path / "outage.png")
    assert (tmp_path / "outage.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        plot(results, "jpg", tmp_path / "outage.jpg")


def test_a_picture_of_nothing_is_a_picture() -> None:
    assert ET.fromstring(svg([], "nothing")) is not None


def test_a_message_older_than_its_queue_keeps_any_is_refused() -> None:
    attributes = {"MessageRetentionPeriod": "3600", "ApproximateNumberOfMessages": "1"}
    with pytest.raises(ScenarioError, match="keeps its messages for 3600 s"):
        scenario_of_queue(Scenario(), attributes, max_receive_count=None, oldest=3601.0)

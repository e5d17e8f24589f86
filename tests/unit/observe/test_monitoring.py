"""The files in ``monitoring/`` name metrics that exist, and promtool agrees with the alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from celery_sqs_backoff.observe.metrics import INSTRUMENTS
from celery_sqs_backoff.sqs.errors import KINDS, Kind
from celery_sqs_backoff.sqs.limits import MAX_IN_FLIGHT_MESSAGES

MONITORING = Path(__file__).parents[3] / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((MONITORING / "prometheus-rules.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}

#: The path of promtool, which is in Debian's package ``prometheus``. ``None``: it is not installed.
PROMTOOL = shutil.which("promtool")

Q = 'queue="mails"'
T = 'queue="mails",task="shop.mail"'


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*panels, *(alert["expr"] for alert in ALERTS.values())]


def known_names() -> set[str]:
    return {f"sqs_backoff_{one.name}" for one in INSTRUMENTS}


@pytest.mark.parametrize("expr", expressions())
def test_metrics_exist(expr):
    """Each panel and each alert uses metrics and labels that workers export."""
    names = set(re.findall(r"sqs_backoff_\w+", expr))
    assert names
    assert names <= known_names()
    labels = {label for one in INSTRUMENTS for label in one.labels.split()}
    for group in re.findall(r"by \(([^)]*)\)", expr):
        assert {label.strip() for label in group.split(",")} <= labels


def test_dashboard_metrics_of_the_menu():
    """The menu of queues reads a metric that exists."""
    [menu] = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "queue"]
    assert set(re.findall(r"sqs_backoff_\w+", menu["query"])) <= known_names()


def test_panels_do_not_overlap():
    """The dashboard has two columns of panels."""
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert {x for x, _ in places} == {0, 12}


def test_limits_of_sqs():
    """The alerts use the quota and the error codes that the package uses."""
    assert f"/ {MAX_IN_FLIGHT_MESSAGES} " in ALERTS["SqsBackoffInFlightQuota"]["expr"]
    refused = re.search(r'code=~"([^"]*)"', ALERTS["SqsBackoffRefused"]["expr"])
    assert refused
    codes = [code for code, kind in KINDS.items() if kind in (Kind.DENIED, Kind.NO_QUEUE)]
    unmatched = [code for code in codes if not re.fullmatch(refused[1], code)]
    assert not unmatched


#: Alert, series (values at 0, 1, 2 ... minutes), and at which minute it fires, with which labels.
FIRES: dict[str, tuple[dict[str, str], int, dict[str, str]]] = {
    "SqsBackoffNoReceive": (
        {
            f"sqs_backoff_poll_age_seconds{{{Q}}}": "0+60x20",
            'sqs_backoff_provider_state{provider="sms",state="paused"}': "1x20",  # of another queue
        },
        10,
        {"queue": "mails"},
    ),
    "SqsBackoffWorkersFull": (
        {
            f"sqs_backoff_poll_age_seconds{{{Q}}}": "0+600x60",
            f"sqs_backoff_messages_running{{{Q}}}": "8x60",  # they hang
        },
        50,
        {"queue": "mails"},
    ),
    "SqsBackoffWorkersGone": (
        {
            f"sqs_backoff_poll_age_seconds{{{Q}}}": "7x10 _x60",
            'sqs_backoff_poll_age_seconds{queue="mails",instance="other"}': "7x12 _x60",
            'sqs_backoff_poll_age_seconds{queue="sms"}': "7x80",
        },
        40,
        {"queue": "mails"},
    ),
    "SqsBackoffReceiveFails": (
        {f'sqs_backoff_receive_failures_total{{{Q},code="ExpiredToken"}}': "0+6x30"},
        20,
        {"queue": "mails", "code": "ExpiredToken"},
    ),
    "SqsBackoffDeadLetters": (
        {f'sqs_backoff_dead_letters_total{{{T},reason="revoked"}}': "_x3 1x30"},
        5,
        {"queue": "mails", "task": "shop.mail", "reason": "revoked"},
    ),
    "SqsBackoffManyDeadLetters": (
        {
            f'sqs_backoff_dead_letters_total{{{T},reason="not retryable"}}': "0+9x40",
            f'sqs_backoff_runs_total{{{T},outcome="unknown"}}': "0+9x40",
            f'sqs_backoff_runs_total{{{T},outcome="succeeded"}}': "0+30x40",
        },
        30,
        {"queue": "mails", "task": "shop.mail"},
    ),
    "SqsBackoffMostRunsFail": (
        {
            f'sqs_backoff_runs_total{{{T},outcome="retryable"}}': "0+9x40",
            f'sqs_backoff_runs_total{{{T},outcome="succeeded"}}': "0+3x40",
        },
        30,
        {"queue": "mails", "task": "shop.mail"},
    ),
    "SqsBackoffProviderPaused": (  # it is back after ten minutes, and its recovery is throttled
        {
            'sqs_backoff_provider_state{provider="mailgun",state="paused"}': "0x3 1x9 0x40",
            'sqs_backoff_provider_state{provider="mailgun",state="recovering"}': "0x13 1x39",
        },
        30,
        {"provider": "mailgun"},
    ),
    "SqsBackoffOldMessages": (
        {f"sqs_backoff_oldest_waiting_seconds{{{Q}}}": "20000+600x30"},
        20,
        {"queue": "mails"},
    ),
    "SqsBackoffInFlightQuota": (
        {
            f"sqs_backoff_messages_waiting{{{Q}}}": "90000x30",
            f"sqs_backoff_messages_running{{{Q}}}": "8x30",
        },
        10,
        {"queue": "mails"},
    ),
    "SqsBackoffLeasesLost": (
        {f"sqs_backoff_leases_lost_total{{{T}}}": "_x3 1x30"},
        5,
        {"queue": "mails", "task": "shop.mail"},
    ),
    "SqsBackoffRefused": (
        {
            f'sqs_backoff_call_failures_total{{{Q},action="DeleteMessageBatch",'
            'code="AccessDenied"}': "0+1x30"
        },
        20,
        {"queue": "mails", "action": "DeleteMessageBatch", "code": "AccessDenied"},
    ),
}

#: The same for alerts that have a case above.
ALSO_FIRES: list[tuple[str, dict[str, str], int, dict[str, str]]] = [
    (  # a bad deploy: the new workers have emptied the queue before they are scraped
        "SqsBackoffDeadLetters",
        {
            f'sqs_backoff_dead_letters_total{{{T},reason="not retryable",pod="new"}}': (
                "_x20 300 302x30"
            ),
        },
        28,
        {"queue": "mails", "task": "shop.mail", "reason": "not retryable"},
    ),
    (  # a worker that starts anew where it was, and gives up its first message later
        "SqsBackoffDeadLetters",
        {f'sqs_backoff_dead_letters_total{{{T},reason="revoked"}}': "7x40 stale _x17 1x30"},
        64,
        {"queue": "mails", "task": "shop.mail", "reason": "revoked"},
    ),
    (  # the same on a machine of its own, hours later: its count is what it was
        "SqsBackoffDeadLetters",
        {
            f'sqs_backoff_dead_letters_total{{{T},reason="revoked",instance="vm"}}': (
                "1x97 stale _x198 1x100"
            ),
            f'sqs_backoff_poll_age_seconds{{{Q},instance="vm"}}': "1x97 _x1 1x400",
        },
        303,
        {"queue": "mails", "task": "shop.mail", "reason": "revoked"},
    ),
    (  # messages that are given up while Prometheus is away
        "SqsBackoffDeadLetters",
        {
            f'sqs_backoff_dead_letters_total{{{T},reason="revoked",instance="vm"}}': (
                "1x97 stale _x40 40x100"
            ),
            f'sqs_backoff_poll_age_seconds{{{Q},instance="vm"}}': "1x97 stale _x40 1x100",
        },
        145,
        {"queue": "mails", "task": "shop.mail", "reason": "revoked"},
    ),
]

#: All is well: traffic, one failure in ten that is retried, and a worker that is busy for long.
WELL = {
    f'sqs_backoff_runs_total{{{T},outcome="succeeded"}}': "0+90x60",
    f'sqs_backoff_runs_total{{{T},outcome="retryable"}}': "0+10x60",
    f'sqs_backoff_dead_letters_total{{{T},reason="revoked"}}': "5x60",
    f"sqs_backoff_poll_age_seconds{{{Q}}}": "0+60x60",
    f"sqs_backoff_messages_running{{{Q}}}": "8x60",
    f"sqs_backoff_messages_waiting{{{Q}}}": "100x60",
    f"sqs_backoff_oldest_waiting_seconds{{{Q}}}": "300x60",
    f"sqs_backoff_leases_lost_total{{{T}}}": "1x60",
    f'sqs_backoff_call_failures_total{{{Q},action="SendMessageBatch",code="KmsThrottled"}}': (
        "0+1x60"
    ),
    # What was counted days ago: a scrape fails once, Prometheus is away for twelve minutes.
    'sqs_backoff_dead_letters_total{task="a",queue="bulk",reason="revoked"}': "31x8 stale 31x50",
    'sqs_backoff_leases_lost_total{task="a",queue="bulk"}': "31x3 stale _x11 31x44",
    # A worker that starts anew, and has long given up a message since.
    'sqs_backoff_dead_letters_total{task="b",queue="bulk",reason="revoked"}': "7x2 stale 1x57",
    # A deploy: the workers change, and for two minutes there are none.
    'sqs_backoff_poll_age_seconds{queue="bulk",instance="old"}': "7x14 _x46",
    'sqs_backoff_poll_age_seconds{queue="bulk",instance="new"}': "_x17 7x43",
    # A queue of a provider that is paused for ten minutes is not received from: that is no age.
    'sqs_backoff_poll_age_seconds{queue="sms"}': "7x15 0x10 7x35",
    'sqs_backoff_provider_state{provider="sms",state="paused"}': "0x15 1x7 0x38",
    'sqs_backoff_provider_state{provider="sms",state="recovering"}': "0x23 1x2 0x35",
}


#: Prometheus is away for 25 minutes, or for an hour: nothing for which to stop the workers.
AWAY = [
    {
        f'sqs_backoff_dead_letters_total{{{T},reason="revoked"}}': "400x40 _x25 400x70",
        f'sqs_backoff_runs_total{{{T},outcome="unknown"}}': "400x40 _x25 400x70",
    },
    {
        f'sqs_backoff_dead_letters_total{{{T},reason="revoked"}}': "0x40 _x60 12x70",
        f'sqs_backoff_runs_total{{{T},outcome="succeeded"}}': "0+20x40 _x60 2000+20x70",
    },
]


def test_alerts_have_cases():
    """Each alert has a case."""
    assert set(FIRES) == set(ALERTS)


def test_alerts_fire(tmp_path):
    """The alerts fire when they should, and at no other time."""
    if PROMTOOL is None:
        pytest.skip("needs promtool (Debian's package prometheus)")
    severity = {name: alert["labels"]["severity"] for name, alert in ALERTS.items()}
    tests = [
        {
            "interval": "1m",
            "input_series": _series(series),
            "alert_rule_test": [
                {
                    "eval_time": f"{minute}m",
                    "alertname": name,
                    "exp_alerts": [{"exp_labels": {"severity": severity[name], **labels}}],
                }
            ],
        }
        for name, series, minute, labels in [
            *((name, *case) for name, case in FIRES.items()),
            *ALSO_FIRES,
        ]
    ]
    tests.append(
        {
            "interval": "1m",
            "input_series": _series(WELL),
            "alert_rule_test": [
                {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []}
                for name in FIRES
                for minute in (20, 24, 28, 59)
            ],
        }
    )
    tests += [
        {
            "interval": "1m",
            "input_series": _series(series),
            "alert_rule_test": [
                {"eval_time": f"{minute}m", "alertname": "SqsBackoffManyDeadLetters"}
                for minute in range(60, 130)
            ],
        }
        for series in AWAY
    ]
    _promtool(tmp_path, "check", "rules", MONITORING / "prometheus-rules.yml")
    # promtool compares annotations too, so the rules under test have no annotations.
    plain = [{k: v for k, v in alert.items() if k != "annotations"} for alert in ALERTS.values()]
    groups = [{"name": "without annotations", "rules": plain}]
    (tmp_path / "plain.yml").write_text(yaml.safe_dump({"groups": groups}))
    case = {"rule_files": ["plain.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(case))  # JSON is YAML
    _promtool(tmp_path, "test", "rules", "tests.yml")


def _series(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": series, "values": found} for series, found in values.items()]


def _promtool(directory: Path, *arguments: Any) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

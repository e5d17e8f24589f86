"""Write the Grafana dashboard and the alert rules: ``python -m`` this module, with a directory.

The dashboard is plain JSON for Grafana's import, with a variable for the data source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from .alerts import rules_file

__all__ = ["DASHBOARD", "RULES", "dashboard", "files", "main"]

DASHBOARD: Final = "grafana-dashboard.json"
RULES: Final = "prometheus-rules.yml"

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 12, 8

#: Title, unit, stacked, and (PromQL, legend) of each panel, two in a row.
_PANELS: Final[tuple[tuple[str, str, bool, tuple[tuple[str, str], ...]], ...]] = (
    (
        "Waiting and running",
        "short",
        True,
        (
            ('sum by (queue) (sqs_backoff_messages_waiting{queue=~"$queue"})', "{{queue}} waiting"),
            ('sum by (queue) (sqs_backoff_messages_running{queue=~"$queue"})', "{{queue}} running"),
        ),
    ),
    (
        "Oldest message that waits",
        "s",
        False,
        (('max by (queue) (sqs_backoff_oldest_waiting_seconds{queue=~"$queue"})', "{{queue}}"),),
    ),
    (
        "Runs by outcome",
        "ops",
        True,
        (
            (
                "sum by (task, outcome)"
                ' (rate(sqs_backoff_runs_total{queue=~"$queue"}[$__rate_interval]))',
                "{{task}} {{outcome}}",
            ),
        ),
    ),
    (
        "Given up, by reason",
        "short",
        True,
        (
            (
                "sum by (task, reason)"
                ' (increase(sqs_backoff_dead_letters_total{queue=~"$queue"}[$__rate_interval]))',
                "{{task}} {{reason}}",
            ),
            (
                "sum by (task)"
                ' (increase(sqs_backoff_discarded_total{queue=~"$queue"}[$__rate_interval]))',
                "{{task}} expired or revoked: deleted",
            ),
        ),
    ),
    (
        "Give up within two hours",
        "short",
        True,
        (('sum by (queue) (sqs_backoff_messages_giving_up{queue=~"$queue"})', "{{queue}}"),),
    ),
    (
        "Share of SQS's quota of messages in flight",
        "percentunit",
        False,
        (
            (
                'sum by (queue) (sqs_backoff_messages_waiting{queue=~"$queue"}'
                ' + sqs_backoff_messages_running{queue=~"$queue"}) / 120000',
                "{{queue}}",
            ),
        ),
    ),
    (
        "Providers that are down, and messages brought forward",
        "short",
        False,
        (
            ("max by (provider) (sqs_backoff_provider_open)", "{{provider}} down"),
            (
                "sum by (provider) (increase(sqs_backoff_recalled_total[$__rate_interval]))",
                "{{provider}} brought forward",
            ),
        ),
    ),
    (
        "Delay before the next attempt, median and 95 of 100",
        "s",
        False,
        tuple(
            (
                f"histogram_quantile({share}, sum by (le, task) (rate("
                'sqs_backoff_retry_delay_seconds_bucket{queue=~"$queue"}[$__rate_interval])))',
                f"{{{{task}}}} {share}",
            )
            for share in (0.5, 0.95)
        ),
    ),
    (
        "Runs per success, 95 of 100",
        "short",
        False,
        (
            (
                "histogram_quantile(0.95, sum by (le, task) (rate("
                'sqs_backoff_attempts_bucket{queue=~"$queue"}[$__rate_interval])))',
                "{{task}}",
            ),
        ),
    ),
    (
        "Calls to SQS",
        "ops",
        True,
        (
            (
                "sum by (action)"
                ' (rate(sqs_backoff_calls_total{queue=~"$queue"}[$__rate_interval]))',
                "{{action}}",
            ),
            (
                'sum (rate(sqs_backoff_receives_total{queue=~"$queue"}[$__rate_interval]))',
                "ReceiveMessage",
            ),
        ),
    ),
    (
        "Failed calls to SQS",
        "ops",
        True,
        (
            (
                "sum by (action, code)"
                ' (rate(sqs_backoff_call_failures_total{queue=~"$queue"}[$__rate_interval]))',
                "{{action}} {{code}}",
            ),
            (
                "sum by (code)"
                ' (rate(sqs_backoff_receive_failures_total{queue=~"$queue"}[$__rate_interval]))',
                "ReceiveMessage {{code}}",
            ),
        ),
    ),
    (
        "Time since the last answered receive",
        "s",
        False,
        (('max by (queue) (sqs_backoff_poll_age_seconds{queue=~"$queue"})', "{{queue}}"),),
    ),
    (
        "Leases lost",
        "short",
        True,
        (
            (
                "sum by (task)"
                ' (increase(sqs_backoff_leases_lost_total{queue=~"$queue"}[$__rate_interval]))',
                "{{task}}",
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "celery-sqs-backoff",
        "title": "Celery on SQS",
        "tags": ["celery", "sqs"],
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "1m",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "queue",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(sqs_backoff_poll_age_seconds, queue)",
                    "multi": True,
                    "includeAll": True,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(_PANELS)],
    }


def _panel(
    number: int, title: str, unit: str, stacked: bool, queries: tuple[tuple[str, str], ...]
) -> dict[str, Any]:
    row, column = divmod(number, 2)
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 20 if stacked else 0,
                    "stacking": {"mode": "normal" if stacked else "none"},
                },
            },
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(queries)
        ],
    }


def files() -> dict[str, str]:
    """Return the files by name."""
    return {DASHBOARD: json.dumps(dashboard(), indent=2) + "\n", RULES: rules_file()}


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def main(directory: Path) -> None:
    """Write them."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (directory / name).write_text(text)
        click.echo(directory / name)


if __name__ == "__main__":
    main()

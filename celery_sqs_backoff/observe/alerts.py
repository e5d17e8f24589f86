"""Alert rules for Prometheus, about what this package does: as data, and as the file for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..sqs.errors import REFUSED_CODES
from ..sqs.limits import MAX_IN_FLIGHT_MESSAGES

__all__ = ["ALERTS", "Alert", "rules_file"]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One rule.

    Attributes:
        name: of the alert.
        expr: PromQL.
        lasts: how long it must hold, such as ``"5m"``.
        severity: ``"critical"``: somebody has to act now; ``"warning"``: today.
        summary: one line; ``{{ $labels.queue }}`` and ``{{ $value }}`` stand for what was found.
        description: what it means and what to do.
    """

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    description: str


#: ``increase`` makes 1.07 of one event.
_ROUNDED: Final = '{{ $value | printf "%.0f" }}'

#: SQS's codes for what does not pass by itself; and for one that is new by then.
_REFUSED: Final = "|".join((".*AccessDenied.*", ".*NonExistent.*", *REFUSED_CODES))


def _new(metric: str, window: str) -> str:
    """How much a counter has grown, a series that has just begun included.

    ``increase`` alone misses what a series begins with: its first event, or all that a worker has
    done before it was scraped for the first time. One that was not scraped for a while is not new:
    it is looked for in a window before this one. If it is smaller than there, its worker has
    started anew. Nothing that Prometheus has tells a worker that started anew from one that it did
    not scrape for longer: that one's totals count as new.
    """
    before = f"last_over_time({metric}[{window}] offset {window})"
    grown = f"increase({metric}[{window}]) > 0"
    return f"({metric} unless {before} or {grown} or {metric} < {before})"


ALERTS: Final = (
    Alert(
        name="SqsBackoffNoReceive",
        expr=(
            "min by (queue) (sqs_backoff_poll_age_seconds) > 300"
            " unless on (queue) sum by (queue) (sqs_backoff_messages_running) > 0"
        ),
        lasts="1m",
        severity="critical",
        summary="No worker receives from {{ $labels.queue }}",
        description=(
            "No ReceiveMessage was answered for five minutes, nothing of it runs, and receiving is"
            " not paused for a provider that is down. If sqs_backoff_messages_running shows that"
            " long tasks of other queues fill its workers, give it workers of its own; else look at"
            " sqs_backoff_receive_failures_total, the credentials and celery sqs-health."
        ),
    ),
    Alert(
        name="SqsBackoffWorkersFull",
        expr="min by (queue) (sqs_backoff_poll_age_seconds) > 6 * 3600",
        lasts="5m",
        severity="warning",
        summary="Nothing was received from {{ $labels.queue }} for {{ $value | humanizeDuration }}",
        description=(
            "Its workers are alive, and full: do their tasks hang? A long task is no fault, so"
            " celery sqs-health says nothing of it. Set time limits, and timeouts in the tasks'"
            " clients."
        ),
    ),
    Alert(
        name="SqsBackoffWorkersGone",
        expr=(
            "count by (queue) (last_over_time(sqs_backoff_poll_age_seconds[1h]))"
            " unless on (queue) count by (queue) (sqs_backoff_poll_age_seconds)"
        ),
        lasts="5m",
        severity="critical",
        summary="No worker of {{ $labels.queue }} is left",
        description=(
            "Workers received from it within the last hour, and none of them can be scraped any"
            " more: they have ended, were scaled to zero, or cannot be reached. Ends by itself an"
            " hour later."
        ),
    ),
    Alert(
        name="SqsBackoffReceiveFails",
        expr="sum by (queue, code) (increase(sqs_backoff_receive_failures_total[10m])) > 10",
        lasts="5m",
        severity="warning",
        summary="Receiving from {{ $labels.queue }} fails: {{ $labels.code }}",
        description="Workers go on trying. Look at SQS, the network and the credentials.",
    ),
    Alert(
        name="SqsBackoffDeadLetters",
        expr=(
            f"sum by (task, queue, reason) ({_new('sqs_backoff_dead_letters_total', '15m')}) > 0"
        ),
        lasts="0m",
        severity="warning",
        summary=f"{_ROUNDED} dead letters of {{{{ $labels.task }}}}: {{{{ $labels.reason }}}}",
        description=(
            "Look at them with celery sqs-peek; replay them with celery sqs-redrive. Without a"
            " dead-letter queue, or with on_give_up='fail', they are deleted."
        ),
    ),
    Alert(
        name="SqsBackoffManyDeadLetters",
        expr=(
            # Not _new: after Prometheus was away it takes old totals for new, and this one is
            # critical. What a new worker does before it is scraped is left to the one above.
            # Nor a quotient: messages that no worker understands have no runs.
            "sum by (task, queue) (increase(sqs_backoff_dead_letters_total[15m])) > 10"
            " unless sum by (task, queue) (increase(sqs_backoff_dead_letters_total[15m]))"
            " <= 0.05 * sum by (task, queue) (increase(sqs_backoff_runs_total[15m]))"
        ),
        lasts="5m",
        severity="critical",
        summary="{{ $labels.task }} empties {{ $labels.queue }} into the dead-letter queue",
        description=(
            "More than one run in twenty ends as a dead letter, or nothing runs at all. After a bad"
            " deploy, stop the workers first: what is left in the queue need not be redriven."
        ),
    ),
    Alert(
        name="SqsBackoffMostRunsFail",
        expr=(
            'sum by (task, queue) (increase(sqs_backoff_runs_total{outcome="retryable"}[10m]))'
            " / sum by (task, queue) (increase(sqs_backoff_runs_total[10m])) > 0.5"
            " and sum by (task, queue) (increase(sqs_backoff_runs_total[10m])) > 20"
        ),
        lasts="5m",
        severity="warning",
        summary="Most runs of {{ $labels.task }} fail and are retried",
        description="Is the provider down? Nothing is lost until retry_for is over.",
    ),
    Alert(
        name="SqsBackoffProviderDown",
        expr="max by (provider) (sqs_backoff_provider_open) > 0",
        lasts="15m",
        severity="warning",
        summary="Provider {{ $labels.provider }} is down",
        description=(
            "Workers probe it, and bring its messages forward when it is back. Until then they"
            " wait without running; none is lost before its retry_for is over."
        ),
    ),
    Alert(
        name="SqsBackoffGivingUpSoon",
        expr="sum by (queue) (sqs_backoff_messages_giving_up) > 0",
        lasts="4m",
        severity="critical",
        summary="{{ $value }} messages of {{ $labels.queue }} give up within two hours",
        description=(
            "Three quarters of their retry_for, or more, are used up. They become dead letters,"
            " which can be redriven once the provider is back."
        ),
    ),
    Alert(
        name="SqsBackoffOldMessages",
        expr="max by (queue) (sqs_backoff_oldest_waiting_seconds) > 6 * 3600",
        lasts="5m",
        severity="warning",
        summary="A message of {{ $labels.queue }} waits for {{ $value | humanizeDuration }}",
        description=(
            "CloudWatch's age of the oldest message leaves out what was received three times or"
            " more; this does not."
        ),
    ),
    Alert(
        name="SqsBackoffInFlightQuota",
        expr=(
            "sum by (queue) (sqs_backoff_messages_waiting + sqs_backoff_messages_running)"
            f" / {MAX_IN_FLIGHT_MESSAGES} > 0.6"
        ),
        lasts="5m",
        severity="warning",
        summary="{{ $labels.queue }} uses {{ $value | humanizePercentage }} of SQS's quota",
        description=(
            "From park_above on (80 %), messages that would back off become dead letters with the"
            " reason 'parked'."
        ),
    ),
    Alert(
        name="SqsBackoffLeasesLost",
        expr=f"sum by (task, queue) ({_new('sqs_backoff_leases_lost_total', '15m')}) > 0",
        lasts="0m",
        severity="warning",
        summary=f"{_ROUNDED} running messages of {{{{ $labels.task }}}} may run twice",
        description="SQS was out of reach or the machine overloaded while they ran.",
    ),
    Alert(
        name="SqsBackoffRefused",
        expr=(
            "sum by (queue, action, code)"
            f' (increase(sqs_backoff_call_failures_total{{code=~"{_REFUSED}"}}[15m])) > 0'
        ),
        lasts="5m",
        severity="critical",
        summary="SQS refuses {{ $labels.action }} on {{ $labels.queue }}: {{ $labels.code }}",
        description="Messages stay where they are until it does not. See celery sqs-doctor.",
    ),
)


def rules_file() -> str:
    """Return the rules as YAML, for ``rule_files`` of Prometheus."""
    return "\n".join([*_lines(), ""])


def _lines() -> Iterator[str]:
    yield "# Written by python -m celery_sqs_backoff.observe.dashboards; change it there."
    yield "groups:"
    yield "  - name: celery-sqs-backoff"
    yield "    rules:"
    for alert in ALERTS:
        yield f"      - alert: {alert.name}"
        yield f"        expr: {_quoted(alert.expr)}"
        yield f"        for: {alert.lasts}"
        yield "        labels:"
        yield f"          severity: {alert.severity}"
        yield "        annotations:"
        yield f"          summary: {_quoted(alert.summary)}"
        yield f"          description: {_quoted(alert.description)}"
        yield '          __dashboardUid__: "celery-sqs-backoff"'


def _quoted(text: str) -> str:
    """A double-quoted scalar of YAML, which JSON's strings are."""
    return json.dumps(text, ensure_ascii=False)

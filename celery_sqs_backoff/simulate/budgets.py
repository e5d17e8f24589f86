"""The package's own budgets, asked about a simulated message."""

from __future__ import annotations

from ..retry import budget
from ..sqs.delivery import Delivery
from ..sqs.visibility import standing
from ..sqs.visibility import visibility_delay as sqs_delay
from .message import Message
from .scenario import Scenario

__all__ = ["delivery", "exhausted", "exhausted_before_run", "longest_hold", "visibility_delay"]


def _standing(scenario: Scenario, message: Message, now: float) -> budget.Standing:
    # SQS counts receives, and a worker does not know what another has hidden without running.
    return standing(delivery(scenario, message, now), retries=message.receives - 1, now=now)


def delivery(scenario: Scenario, message: Message, now: float) -> Delivery:
    """Return a message's receive as a worker sees it."""
    return Delivery(
        message_id=message.id,
        queue_url="",
        received_at=now,
        receive_count=message.receives,
        first_received_at=message.first_received_at,
        sent_at=message.sent_at,
        max_receive_count=scenario.max_receive_count,
        retention_seconds=int(scenario.retention),
    )


def exhausted(scenario: Scenario, message: Message, now: float, delay: float) -> str | None:
    """Say which budget leaves no retry after a failure; ``None`` = there is one."""
    task = scenario.task
    reason = budget.exhausted(
        _standing(scenario, message, now),
        max_retries=task.max_retries,
        retry_for=task.retry_for,
        delay=delay,
    )
    return None if reason is None else reason.value


def exhausted_before_run(scenario: Scenario, message: Message, now: float) -> str | None:
    """Say which budget was exhausted before this receive; ``None`` = the message may run."""
    task = scenario.task
    reason = budget.exhausted_before_run(
        _standing(scenario, message, now),
        max_retries=task.max_retries,
        retry_for=task.retry_for,
        crashes=0,
        crash_budget=task.crash_budget,
    )
    return None if reason is None else reason.value


def visibility_delay(scenario: Scenario, message: Message, now: float, delay: float) -> int:
    """Return the whole seconds that SQS is asked for."""
    return sqs_delay(delay, delivery(scenario, message, now), now=now)


def longest_hold(scenario: Scenario, message: Message, now: float) -> float:
    """Most seconds that the gate may hide a message; none are left if 0 or less."""
    return budget.longest_hold(_standing(scenario, message, now), retry_for=scenario.task.retry_for)

"""What is wrong between a queue and its dead-letter queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...sqs.limits import MAX_MAX_RECEIVE_COUNT
from ...units import in_words
from ..facts import Facts, QueueFacts, TaskFacts
from ..finding import Fix, Report, Rule
from ..horizon import dead_lettered_after
from ._fixes import create_queue, set_attribute

__all__ = ["RULES"]

_FOURTEEN_DAYS_SECONDS = 1_209_600

#: An attribute of each dead-letter queue that a line creates.
_KEPT = f"MessageRetentionPeriod={_FOURTEEN_DAYS_SECONDS}"

#: Tasks whose delays are drawn 200 times: those that needed the most receives when drawn once.
_LOOKED_AT_CLOSELY = 3

#: Queues that a RedriveAllowPolicy may name.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SetQueueAttributes.html
_MOST_SOURCES = 10

#: What SQS gives a queue that does not say.
_FOUR_DAYS_SECONDS = 345_600


def _messages(queue: QueueFacts) -> str:
    return f"{queue.visible} messages" if queue.visible else "Each message"


def _pairs(facts: Facts) -> Iterator[tuple[QueueFacts, QueueFacts]]:
    for queue in facts.consumed:
        if queue.dlq is not None:
            yield queue, queue.dlq


def _missing(facts: Facts) -> Iterator[Report]:
    if facts.covered and not any(task.wants_dlq for task in facts.covered):
        return
    for queue in facts.consumed:
        if not queue.redrive_policy:
            dlq = _dlq_name(queue)
            arn = f"{queue.arn.rpartition(':')[0]}:{dlq}" if queue.arn else f"ARN of {dlq}"
            fix = _set_redrive_policy(queue, arn)
            yield (
                queue.name,
                "the queue has no RedrivePolicy; expected one with a dead-letter queue",
                "A task that is given up is deleted with its message; nothing is left to look at"
                " or to replay.",
                replace(
                    fix,
                    aws=f"{create_queue(queue, dlq, _KEPT)} && {fix.aws}",
                    text=f"In Terraform, add the queue {dlq} too.",
                ),
            )


def _dlq_name(queue: QueueFacts) -> str:
    name = queue.url.rpartition("/")[2]
    return f"{name.removesuffix('.fifo')}-dlq{'.fifo' if queue.is_fifo else ''}"


def _gone(facts: Facts) -> Iterator[Report]:
    for queue, dlq in _pairs(facts):
        if dlq.is_missing:
            yield (
                queue.name,
                f"the dead-letter queue {dlq.name} does not exist",
                "What is given up can go nowhere: it stays hidden in the queue and is tried again"
                " until retention deletes it.",
                Fix(aws=create_queue(queue, dlq.name, _KEPT)),
            )


def _not_allowed(facts: Facts) -> Iterator[Report]:
    for queue, dlq in _pairs(facts):
        policy = dlq.redrive_allow_policy
        permission = policy.get("redrivePermission", "allowAll")
        allowed = found if isinstance(found := policy.get("sourceQueueArns"), list) else []
        if permission == "denyAll" or (permission == "byQueue" and queue.arn not in allowed):
            # Each fix replaces the policy: it names all that share the dead-letter queue.
            sharing = {one.arn or "" for one, other in _pairs(facts) if other.url == dlq.url}
            yield (
                queue.name,
                f"RedriveAllowPolicy of {dlq.name} is {permission!r} and does not name {queue.arn}",
                "SQS moves nothing from this queue to its dead-letter queue.",
                _allow(dlq, [*allowed, *sorted(arn for arn in sharing if arn not in allowed)]),
            )


def _allow(dlq: QueueFacts, sources: list[object]) -> Fix:
    policy: dict[str, object] = {"redrivePermission": "allowAll"}
    if len(sources) <= _MOST_SOURCES:
        policy = {"redrivePermission": "byQueue", "sourceQueueArns": sources}
    return set_attribute(dlq, "RedriveAllowPolicy", policy)


def _dlq_of_dlq(facts: Facts) -> Iterator[Report]:
    for queue, dlq in _pairs(facts):
        if dlq.redrive_policy:
            yield (
                queue.name,
                f"the dead-letter queue {dlq.name} has a RedrivePolicy itself"
                f" (maxReceiveCount {dlq.max_receive_count})",
                "Looking at its messages, in the console or with sqs-peek, counts as a receive: SQS"
                " moves them on, away from who looks for them.",
                set_attribute(dlq, "RedrivePolicy", ""),
            )


def _short_lived(facts: Facts) -> Iterator[Report]:
    for queue, dlq in _pairs(facts):
        mine, theirs = queue.retention_seconds, dlq.retention_seconds
        if mine is None or theirs is None:
            continue
        if dlq.is_fifo:
            least, expected = _FOUR_DAYS_SECONDS, f"at least {_FOUR_DAYS_SECONDS}"
            effect = f"A dead letter is deleted after {in_words(theirs)}."
        else:
            least = min(mine + 1, _FOURTEEN_DAYS_SECONDS)
            expected = f"more than the queue's ({mine}), or {_FOURTEEN_DAYS_SECONDS}"
            effect = (
                "A message that SQS moves keeps its age: one that was retried for"
                f" {in_words(theirs)} is deleted as soon as it is a dead letter."
            )
        if theirs < least:
            yield (
                queue.name,
                f"MessageRetentionPeriod of {dlq.name} is {theirs} seconds; expected {expected}",
                effect,
                set_attribute(dlq, "MessageRetentionPeriod", _FOURTEEN_DAYS_SECONDS),
            )


def _few_receives(facts: Facts) -> Iterator[Report]:
    seen: list[TaskFacts] = []  # one of each that wait alike: most tasks share their options
    for queue in facts.consumed:
        tasks = _covered(facts, queue)
        first: dict[int, TaskFacts] = {}
        for task in tasks:
            first.setdefault(_place(task.on_fifo if queue.is_fifo else task, seen), task)
        # To look at all of them closely would take seconds of CPU, also of a worker that starts.
        likely = sorted(first, key=lambda at: seen[at].about_receives_needed, reverse=True)
        needy = [
            (needed, at)
            for at in likely[:_LOOKED_AT_CLOSELY]
            if (needed := seen[at].receives_needed) is not None
        ]
        if needy:
            needed, at = max(needy)
            task = first[at].on_fifo if queue.is_fifo else first[at]
            yield from _fewer_than_needed(queue, task, needed)


def _covered(facts: Facts, queue: QueueFacts) -> list[TaskFacts]:
    return [task for task in facts.sent_to(queue) if task.is_covered]


def _place(task: TaskFacts, seen: list[TaskFacts]) -> int:
    """Where the first of those that wait alike is; it is put there if it is this one."""
    for at, other in enumerate(seen):
        if task.waits_like(other):
            return at
    seen.append(task)
    return len(seen) - 1


def _fewer_than_needed(queue: QueueFacts, task: TaskFacts, needed: int) -> Iterator[Report]:
    allowed = queue.max_receive_count
    if allowed is None or allowed >= needed:
        return
    cap = f" under its fifo_cap of {task.fifo_cap:g} s" if queue.is_fifo else ""
    yield (
        queue.name,
        f"maxReceiveCount is {allowed}; 99 of 100 messages of {task.name} need"
        f" {_in_receives(needed)} receives until its budgets end (drawn 200 times from its"
        f" delays{cap})",
        _in_an_outage(queue, task, allowed),
        _more_receives(queue, task, allowed, needed),
    )


def _in_receives(needed: int) -> str:
    most = MAX_MAX_RECEIVE_COUNT
    return f"more than {most}" if needed > most else f"up to {needed}"


def _more_receives(queue: QueueFacts, task: TaskFacts, allowed: int, needed: int) -> Fix:
    if needed <= MAX_MAX_RECEIVE_COUNT:
        return _set_redrive_policy(queue, queue.dlq_arn)
    longer = "the fifo_cap" if queue.is_fifo else "the cap of the delays"
    text = (
        f"SQS allows {MAX_MAX_RECEIVE_COUNT} at the most: raise {longer} of {task.name}, or lower"
        " its retry_for."
    )
    if allowed == MAX_MAX_RECEIVE_COUNT:
        return Fix(text=text)
    return replace(_set_redrive_policy(queue, queue.dlq_arn), text=text)


def _in_an_outage(queue: QueueFacts, task: TaskFacts, allowed: int) -> str:
    assert task.backoff is not None
    first, half = dead_lettered_after(
        task.backoff,
        allowed,
        retry_for=task.retry_for,
        max_retries=task.max_retries,
        retention=queue.retention_seconds or _FOUR_DAYS_SECONDS,
    )
    if queue.is_fifo:
        return (
            "The first message of each message group would be dead-lettered about"
            f" {in_words(half)} into an outage, then the next one. Deploys and crashes"
            " use up receives too."
        )
    return (
        f"{_messages(queue)} would be dead-lettered about {in_words(half)} into an outage, the"
        f" first after {in_words(first)}. Deploys and crashes use up receives too."
    )


def _set_redrive_policy(queue: QueueFacts, dlq_arn: str | None) -> Fix:
    policy = {"deadLetterTargetArn": dlq_arn, "maxReceiveCount": MAX_MAX_RECEIVE_COUNT}
    return set_attribute(queue, "RedrivePolicy", policy)


def _retention(facts: Facts) -> Iterator[Report]:
    for queue in facts.consumed:
        tasks = _covered(facts, queue)
        horizons = [(task.retry_for, task) for task in tasks if task.retry_for is not None]
        kept = queue.retention_seconds
        if kept is None or not horizons:
            continue
        horizon, task = max(horizons, key=lambda pair: pair[0])
        if kept <= horizon:
            yield (
                queue.name,
                f"MessageRetentionPeriod is {kept} seconds ({in_words(kept)}); {task.name} is"
                f" retried for {in_words(horizon)}",
                f"{_messages(queue)} would be given up {in_words(kept)} into an outage, because SQS"
                " deletes it then.",
                _longer_retention(queue, task, kept, horizon),
            )


def _longer_retention(queue: QueueFacts, task: TaskFacts, kept: int, horizon: float) -> Fix:
    longest = _FOURTEEN_DAYS_SECONDS
    fix = set_attribute(queue, "MessageRetentionPeriod", longest)
    if horizon < longest:
        return fix
    text = f"SQS keeps no message for longer than 14 days: lower the retry_for of {task.name}."
    return replace(fix if kept < longest else Fix(), text=text)


_DLQ_PAGE = (
    "https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/"
    "sqs-dead-letter-queues.html"
)

RULES = (
    Rule(
        "W002",
        "The queue has no dead-letter queue",
        "What cannot be retried is for a person to look at, and to replay once the cause is gone."
        " Without a dead-letter queue it is deleted.",
        _missing,
    ),
    Rule("E004", "The dead-letter queue does not exist", _DLQ_PAGE, _gone),
    Rule(
        "E006",
        "The dead-letter queue does not take this queue's messages",
        f"RedriveAllowPolicy names the queues that may use it, at most {_MOST_SOURCES}."
        f" {_DLQ_PAGE}",
        _not_allowed,
    ),
    Rule(
        "W007",
        "The dead-letter queue has a redrive policy of its own",
        f"Each look at a dead letter counts as a receive. {_DLQ_PAGE}",
        _dlq_of_dlq,
    ),
    Rule(
        "W008",
        "Dead letters are deleted early",
        "On standard queues the enqueue timestamp of a message that SQS moves is unchanged, so its"
        " time in the queue counts. On FIFO queues it is reset; there the rule expects SQS's own"
        f" default, four days. {_DLQ_PAGE}",
        _short_lived,
    ),
    Rule(
        "W009",
        "Retention ends before the retries do",
        "SQS deletes a message when its retention period is over, hidden or not. Workers give it"
        " up shortly before.",
        _retention,
    ),
    Rule(
        "W010",
        "maxReceiveCount is too small for the delays",
        "SQS moves a message, without a reason on it, at the receive after maxReceiveCount; workers"
        " give it up on the last one. On a FIFO queue fifo_cap makes delays shorter, so it takes"
        f" more receives. SQS allows up to {MAX_MAX_RECEIVE_COUNT}. {_DLQ_PAGE}",
        _few_receives,
    ),
)

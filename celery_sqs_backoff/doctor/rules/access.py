"""What this identity may not do, as far as harmless calls can tell."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...sqs.find_queue import NOT_CREATED, NOT_PREDEFINED
from ..facts import Facts, QueueFacts
from ..finding import Fix, Report, Rule
from ._fixes import create_queue

__all__ = ["RULES"]

#: Characters in the name of a policy.
#: https://docs.aws.amazon.com/IAM/latest/APIReference/API_PutRolePolicy.html
_MOST_POLICY_NAME = 128


def _unreadable(facts: Facts) -> Iterator[Report]:
    for queue in facts.queues:
        if not queue.is_consumed or queue.attributes is not None or not queue.is_missing:
            continue
        if queue.failure == NOT_PREDEFINED:
            yield (
                queue.name,
                "the app consumes the queue, and predefined_queues does not name it",
                "Workers that consume it do not start, and nothing can be sent to it.",
                Fix(
                    text="Add it to predefined_queues, or take it out of task_queues. If workers"
                    " consume others (-Q), name those: sqs-doctor -Q, or task_queues."
                ),
            )
            continue
        yield (
            queue.name,
            f"the queue does not exist ({queue.failure})",
            "The first worker or sender creates it, if it may, without a dead-letter queue: what"
            " is given up then is deleted."
            if queue.failure == NOT_CREATED
            else "Workers that consume it receive nothing; what is sent to it is refused.",
            Fix(
                aws=create_queue(queue, queue.url.rpartition("/")[2]),
                text=_elsewhere(queue)
                + "If workers consume others (-Q), name those: sqs-doctor -Q, or task_queues.",
            ),
        )


def _not_looked_at(facts: Facts) -> Iterator[Report]:
    if not facts.are_all:
        return
    looked_at = {queue.name for queue in facts.queues}
    tasks: dict[str, list[str]] = {}
    for task in facts.app.tasks:
        for queue in {task.queue, *task.also_to} - looked_at:
            if queue is not None:
                tasks.setdefault(queue, []).append(task.name)
    for name, (first, *more) in sorted(tasks.items()):
        yield (
            name,
            f"{first}{f' and {len(more)} more go' if more else ' goes'} there unless its caller"
            f" names another; looked at: {', '.join(sorted(looked_at))}",
            "How this queue is set up was not checked.",
            Fix(text=f"Name what workers consume: sqs-doctor -Q {name}, or task_queues."),
        )


def _elsewhere(queue: QueueFacts) -> str:
    """Calls go to the client's Region, whichever the URL names: there the queue does not exist."""
    if queue.region is None or queue.failure == NOT_CREATED:
        return ""
    return (
        f"Its URL is one of {queue.region}: is that the region in broker_transport_options, or in"
        " predefined_queues? "
    )


def _denied(facts: Facts) -> Iterator[Report]:
    for queue in facts.queues:
        for one, arn in ((queue, queue.arn), (queue.dlq, queue.dlq_arn)):
            if one is not None and one.denied:
                actions = ", ".join(one.denied)
                yield (
                    one.name,
                    f"SQS refuses {actions} to the identity that ran this",
                    _consequence(one),
                    Fix(aws=_statement(one, arn), text="Workers may run as another identity."),
                )


def _dlq_unreadable(facts: Facts) -> Iterator[Report]:
    for queue in facts.consumed:
        dlq = queue.dlq
        if dlq is not None and dlq.attributes is None and not dlq.is_missing:
            yield (
                queue.name,
                f"the dead-letter queue {dlq.name} cannot be read ({dlq.failure})",
                "Whether it keeps dead letters long enough, and takes them, was not checked.",
                Fix(text="Run the doctor with sqs:GetQueueAttributes on the dead-letter queue."),
            )


def _consequence(queue: QueueFacts) -> str:
    if not queue.is_consumed:
        return "What is given up stays hidden in its queue and never becomes a dead letter."
    if "sqs:ChangeMessageVisibility" in queue.denied:
        return "No retry can be delayed and no hold renewed: tasks run again while they run."
    if "sqs:DeleteMessage" in queue.denied:
        return "Every task runs again and again, until maxReceiveCount ends it."
    return "Workers cannot see how the queue is set up, or cannot receive."


def _statement(queue: QueueFacts, arn: str | None) -> str:
    statement = {
        "Effect": "Allow",
        "Action": list(queue.denied),
        "Resource": arn or f"ARN of {queue.name}",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    # Of its own: put-role-policy replaces what the role has under the same name.
    actions = (action.partition(":")[2] for action in queue.denied)
    name = "-".join([queue.url.rpartition("/")[2], *actions])[:_MOST_POLICY_NAME]
    return (
        f"aws iam put-role-policy --role-name WORKER_ROLE --policy-name {name}"
        f" --policy-document '{policy}'"
    )


RULES = (
    Rule(
        "E001",
        "A queue that workers consume does not exist",
        "predefined_queues or task_queues name it.",
        _unreadable,
    ),
    Rule(
        "E027",
        "An action is denied",
        "Tried harmlessly: DeleteMessage and ChangeMessageVisibility with a receipt handle that"
        " does not exist, SendMessage to the dead-letter queue without a message. SQS checks"
        " permissions first.",
        _denied,
    ),
    Rule(
        "W036",
        "A queue that tasks go to was not looked at",
        "Without task_queues an app knows its default queue alone. A task's queue, task_routes or"
        " beat_schedule name others, and workers receive from those that their -Q names.",
        _not_looked_at,
    ),
    Rule(
        "I033",
        "The dead-letter queue cannot be read",
        "A worker need not read it, and the policy in docs/iam.md does not let it: it sends there.",
        _dlq_unreadable,
    ),
)

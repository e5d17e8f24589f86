"""The rules: what is wrong with queues, dead-letter queues, tasks, settings and permissions.

An id is never used again, also when its rule is gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

from ..sqs.find_queue import NOT_CREATED, NOT_PREDEFINED
from ..sqs.limits import (
    MAX_MAX_RECEIVE_COUNT,
    MAX_MESSAGE_BYTES,
    MAX_VISIBILITY_TIMEOUT_SECONDS,
)
from ..units import in_words
from .facts import Facts, QueueFacts, TaskFacts
from .finding import Finding, Fix, Report, Rule, Severity, aws_sqs, create_queue, set_attribute
from .horizon import dead_lettered_after

#: A visibility timeout from here on is long: a killed worker's messages wait for it to end.
_LONG_SECONDS: Final = 3_600

#: What SQS gives a queue that does not say, and the most that it allows.
_FOUR_DAYS_SECONDS: Final = 345_600
_FOURTEEN_DAYS_SECONDS: Final = 1_209_600

#: An attribute of each dead-letter queue that a line creates.
_KEPT: Final = f"MessageRetentionPeriod={_FOURTEEN_DAYS_SECONDS}"

#: Tasks whose delays are drawn 200 times: those that needed the most receives when drawn once.
_LOOKED_AT_CLOSELY: Final = 3

#: Queues that a RedriveAllowPolicy may name.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SetQueueAttributes.html
_MOST_SOURCES: Final = 10

#: Messages that a worker may hold beside those that run before the doctor speaks of it.
_MUCH_PREFETCH: Final = 1_000

#: Messages in an event or reply queue that show that nobody reads it.
_PILED_UP: Final = 100

#: Characters in the name of a policy.
#: https://docs.aws.amazon.com/IAM/latest/APIReference/API_PutRolePolicy.html
_MOST_POLICY_NAME: Final = 128

#: Classes that say nothing about whether the work was done.
_BROAD: Final = frozenset(
    {
        "builtins.BaseException",
        "builtins.Exception",
        "requests.exceptions.RequestException",
        "httpx.HTTPError",
        "httpx.RequestError",
        "botocore.exceptions.BotoCoreError",
        "botocore.exceptions.ClientError",
        "aiohttp.client_exceptions.ClientError",
        "smtplib.SMTPException",
        "urllib.error.URLError",
    }
)

_DLQ_PAGE: Final = (
    "https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/"
    "sqs-dead-letter-queues.html"
)

_rules: list[Rule] = []

_Ask: TypeAlias = Callable[[Facts], Iterable[Report]]

#: Evidence, consequence and fix of one queue; ``None`` = it does not have the fault.
_QueueReport: TypeAlias = tuple[str, str, Fix] | None
_AskQueue: TypeAlias = Callable[[QueueFacts, Facts], _QueueReport]


def _rule(id_: str, title: str, why: str, *, is_live: bool = True) -> Callable[[_Ask], _Ask]:
    """Make a rule of a function that reports every subject that has the fault."""

    def add(ask: _Ask) -> _Ask:
        _rules.append(Rule(id_, title, why, ask, is_live))
        return ask

    return add


def _queue_rule(id_: str, title: str, why: str) -> Callable[[_AskQueue], _AskQueue]:
    """Make a rule of a function that is asked about each queue that could be read."""

    def add(ask: _AskQueue) -> _AskQueue:
        def ask_all(facts: Facts) -> Iterator[Report]:
            for queue in facts.consumed:
                if (report := ask(queue, facts)) is not None:
                    yield (queue.name, *report)

        _rules.append(Rule(id_, title, why, ask_all))
        return ask

    return add


@_queue_rule(
    "E011",
    "The queue's visibility timeout is 0",
    "A received message must stay hidden until its worker has renewed its hold for the first"
    " time. With 0 SQS shows it again at once.",
)
def _visibility_timeout_zero(queue: QueueFacts, facts: Facts) -> _QueueReport:
    if queue.visibility_timeout_seconds == 0:
        return (
            "VisibilityTimeout is 0; expected at least 30 seconds",
            "Workers ask for 30 seconds at each receive; whoever does not, such as a worker"
            " without this package, runs every task while others run it too.",
            set_attribute(queue, "VisibilityTimeout", 30),
        )
    return None


@_queue_rule(
    "W012",
    "The queue's visibility timeout is long",
    "It need not be longer than a task, because workers renew their hold on each message. It is how"
    " long the messages of a killed worker stay hidden. SQS's"
    " maximum is 12 hours from the receive:"
    " https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-visibility-timeout.html",
)
def _visibility_timeout_long(queue: QueueFacts, facts: Facts) -> _QueueReport:
    seconds = queue.visibility_timeout_seconds
    if seconds is not None and seconds >= _LONG_SECONDS:
        at_most = (
            " SQS allows no renewal beyond 12 hours, so a task cannot hold its message for longer."
            if seconds >= MAX_VISIBILITY_TIMEOUT_SECONDS
            else ""
        )
        return (
            f"VisibilityTimeout is {seconds} ({in_words(seconds)}); expected less than"
            f" {_LONG_SECONDS}: workers renew it for tasks that run longer",
            f"The messages of a killed worker stay hidden for {in_words(seconds)}.{at_most}",
            set_attribute(queue, "VisibilityTimeout", 30),
        )
    return None


@_rule(
    "I014",
    "The queue refuses messages that SQS would take",
    "Queues made before August 2025 keep their limit of 256 KiB:"
    " https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-messages.html",
)
def _small_messages(facts: Facts) -> Iterator[Report]:
    for queue in facts.consumed:
        for one in (queue, *([queue.dlq] if queue.dlq else [])):
            size = one.max_message_bytes
            if size is not None and size < MAX_MESSAGE_BYTES:
                yield (
                    one.name,
                    f"MaximumMessageSize is {size} bytes; SQS allows {MAX_MESSAGE_BYTES} since"
                    " August 2025",
                    "A larger message is refused when it is sent; a dead letter whose record does"
                    " not fit loses its traceback.",
                    set_attribute(one, "MaximumMessageSize", MAX_MESSAGE_BYTES),
                )


@_queue_rule(
    "W015",
    "The queue delays every message",
    "A queue's DelaySeconds applies to each message that brings none of its own. Celery's"
    " countdown and retries need none.",
)
def _delay(queue: QueueFacts, facts: Facts) -> _QueueReport:
    if queue.delay_seconds:
        return (
            f"DelaySeconds is {queue.delay_seconds}; expected 0",
            f"Each task without a countdown starts {in_words(queue.delay_seconds)} late.",
            set_attribute(queue, "DelaySeconds", 0),
        )
    return None


@_queue_rule(
    "W002",
    "The queue has no dead-letter queue",
    "What cannot be retried is for a person to look at, and to replay once the cause is gone."
    " Without a dead-letter queue it is deleted.",
)
def _missing(queue: QueueFacts, facts: Facts) -> _QueueReport:
    if facts.covered and not any(task.wants_dlq for task in facts.covered):
        return None
    if not queue.redrive_policy:
        dlq = _dlq_name(queue)
        arn = f"{queue.arn.rpartition(':')[0]}:{dlq}" if queue.arn else f"ARN of {dlq}"
        fix = _set_redrive_policy(queue, arn)
        return (
            "the queue has no RedrivePolicy; expected one with a dead-letter queue",
            "A task that is given up is deleted with its message; nothing is left to look at"
            " or to replay.",
            replace(
                fix,
                aws=f"{create_queue(queue, dlq, _KEPT)} && {fix.aws}",
                text=f"In Terraform, add the queue {dlq} too.",
            ),
        )
    return None


def _dlq_name(queue: QueueFacts) -> str:
    name = queue.url.rpartition("/")[2]
    return f"{name.removesuffix('.fifo')}-dlq{'.fifo' if queue.is_fifo else ''}"


def _set_redrive_policy(queue: QueueFacts, dlq_arn: str | None) -> Fix:
    policy = {"deadLetterTargetArn": dlq_arn, "maxReceiveCount": MAX_MAX_RECEIVE_COUNT}
    return set_attribute(queue, "RedrivePolicy", policy)


@_queue_rule(
    "E004",
    "The dead-letter queue does not exist",
    _DLQ_PAGE,
)
def _gone(queue: QueueFacts, facts: Facts) -> _QueueReport:
    dlq = queue.dlq
    if dlq is None:
        return None
    if dlq.is_missing:
        return (
            f"the dead-letter queue {dlq.name} does not exist",
            "What is given up can go nowhere: it stays hidden in the queue and is tried again"
            " until retention deletes it.",
            Fix(aws=create_queue(queue, dlq.name, _KEPT)),
        )
    return None


@_queue_rule(
    "E006",
    "The dead-letter queue does not take this queue's messages",
    f"RedriveAllowPolicy names the queues that may use it, at most {_MOST_SOURCES}. {_DLQ_PAGE}",
)
def _not_allowed(queue: QueueFacts, facts: Facts) -> _QueueReport:
    dlq = queue.dlq
    if dlq is None:
        return None
    policy = dlq.redrive_allow_policy
    permission = policy.get("redrivePermission", "allowAll")
    allowed = found if isinstance(found := policy.get("sourceQueueArns"), list) else []
    if permission == "denyAll" or (permission == "byQueue" and queue.arn not in allowed):
        # Each fix replaces the policy: it names all that share the dead-letter queue.
        others = [one for one in facts.consumed if one.dlq and one.dlq.url == dlq.url]
        sharing = {one.arn or "" for one in others}
        return (
            f"RedriveAllowPolicy of {dlq.name} is {permission!r} and does not name {queue.arn}",
            "SQS moves nothing from this queue to its dead-letter queue.",
            _allow(dlq, [*allowed, *sorted(arn for arn in sharing if arn not in allowed)]),
        )
    return None


def _allow(dlq: QueueFacts, sources: list[object]) -> Fix:
    policy: dict[str, object] = {"redrivePermission": "allowAll"}
    if len(sources) <= _MOST_SOURCES:
        policy = {"redrivePermission": "byQueue", "sourceQueueArns": sources}
    return set_attribute(dlq, "RedriveAllowPolicy", policy)


@_queue_rule(
    "W007",
    "The dead-letter queue has a redrive policy of its own",
    f"Each look at a dead letter counts as a receive. {_DLQ_PAGE}",
)
def _dlq_of_dlq(queue: QueueFacts, facts: Facts) -> _QueueReport:
    dlq = queue.dlq
    if dlq is None:
        return None
    if dlq.redrive_policy:
        return (
            f"the dead-letter queue {dlq.name} has a RedrivePolicy itself"
            f" (maxReceiveCount {dlq.max_receive_count})",
            "Looking at its messages, in the console or with sqs-peek, counts as a receive: SQS"
            " moves them on, away from who looks for them.",
            set_attribute(dlq, "RedrivePolicy", ""),
        )
    return None


@_queue_rule(
    "W008",
    "Dead letters are deleted early",
    "On standard queues the enqueue timestamp of a message that SQS moves is unchanged, so its"
    " time in the queue counts. On FIFO queues it is reset; there the rule expects SQS's own"
    f" default, four days. {_DLQ_PAGE}",
)
def _short_lived(queue: QueueFacts, facts: Facts) -> _QueueReport:
    dlq = queue.dlq
    if dlq is None:
        return None
    mine, theirs = queue.retention_seconds, dlq.retention_seconds
    if mine is None or theirs is None:
        return None
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
        return (
            f"MessageRetentionPeriod of {dlq.name} is {theirs} seconds; expected {expected}",
            effect,
            set_attribute(dlq, "MessageRetentionPeriod", _FOURTEEN_DAYS_SECONDS),
        )
    return None


@_queue_rule(
    "I033",
    "The dead-letter queue cannot be read",
    "A worker need not read it, and the policy in docs/iam.md does not let it: it sends there.",
)
def _dlq_unreadable(queue: QueueFacts, facts: Facts) -> _QueueReport:
    dlq = queue.dlq
    if dlq is not None and dlq.attributes is None and not dlq.is_missing:
        return (
            f"the dead-letter queue {dlq.name} cannot be read ({dlq.failure})",
            "Whether it keeps dead letters long enough, and takes them, was not checked.",
            Fix(text="Run the doctor with sqs:GetQueueAttributes on the dead-letter queue."),
        )
    return None


@_queue_rule(
    "W009",
    "Retention ends before the retries do",
    "SQS deletes a message when its retention period is over, hidden or not. Workers give it"
    " up shortly before.",
)
def _retention(queue: QueueFacts, facts: Facts) -> _QueueReport:
    tasks = _covered(facts, queue)
    horizons = [(task.retry_for, task) for task in tasks if task.retry_for is not None]
    kept = queue.retention_seconds
    if kept is None or not horizons:
        return None
    horizon, task = max(horizons, key=lambda pair: pair[0])
    if kept <= horizon:
        return (
            f"MessageRetentionPeriod is {kept} seconds ({in_words(kept)}); {task.name} is"
            f" retried for {in_words(horizon)}",
            f"{_messages(queue)} would be given up {in_words(kept)} into an outage, because SQS"
            " deletes it then.",
            _longer_retention(queue, task, kept, horizon),
        )
    return None


def _longer_retention(queue: QueueFacts, task: TaskFacts, kept: int, horizon: float) -> Fix:
    longest = _FOURTEEN_DAYS_SECONDS
    fix = set_attribute(queue, "MessageRetentionPeriod", longest)
    if horizon < longest:
        return fix
    text = f"SQS keeps no message for longer than 14 days: lower the retry_for of {task.name}."
    return replace(fix if kept < longest else Fix(), text=text)


def _messages(queue: QueueFacts) -> str:
    return f"{queue.visible} messages" if queue.visible else "Each message"


def _covered(facts: Facts, queue: QueueFacts) -> list[TaskFacts]:
    return [task for task in facts.sent_to(queue) if task.is_covered]


@_rule(
    "W010",
    "maxReceiveCount is too small for the delays",
    "SQS moves a message, without a reason on it, at the receive after maxReceiveCount; workers"
    " give it up on the last one. On a FIFO queue fifo_cap makes delays shorter, so it takes"
    f" more receives. SQS allows up to {MAX_MAX_RECEIVE_COUNT}. {_DLQ_PAGE}",
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


def _place(task: TaskFacts, seen: list[TaskFacts]) -> int:
    """Return the index of the first task that waits alike, and append the task if there is none."""
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


@_rule(
    "E001",
    "A queue that workers consume does not exist",
    "predefined_queues or task_queues name it.",
)
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


def _elsewhere(queue: QueueFacts) -> str:
    """Return a hint about the Region. Calls go to the client's, whichever the URL names."""
    if queue.region is None or queue.failure == NOT_CREATED:
        return ""
    return (
        f"Its URL is one of {queue.region}: is that the region in broker_transport_options, or in"
        " predefined_queues? "
    )


@_rule(
    "W036",
    "A queue that tasks go to was not looked at",
    "Without task_queues an app knows its default queue alone. A task's queue, task_routes or"
    " beat_schedule name others, and workers receive from those that their -Q names.",
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


@_rule(
    "E027",
    "An action is denied",
    "Tried harmlessly: DeleteMessage and ChangeMessageVisibility with a receipt handle that"
    " does not exist, SendMessage to the dead-letter queue without a message. SQS checks"
    " permissions first.",
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


@_rule(
    "W019",
    "A task is not covered",
    "Tasks without the base class keep Celery's behaviour on SQS: retries are copies with a new"
    " message id, and the dead-letter queue is never used.",
    is_live=False,
)
def _without_base_class(facts: Facts) -> Iterator[Report]:
    if not facts.covered:
        return  # an app that does not use the package yet
    for task in facts.app.tasks:
        if task.is_covered:
            continue
        how = "a task that fails is not run again"
        if task.autoretries:
            how = "Celery publishes a copy for each retry"
        elif not task.acks_late:
            how = "its message is deleted before it runs"
        yield (
            task.name,
            "its base class is not SQSBackoffTask",
            f"It is retried as Celery does: {how}, and no dead letter says why it failed.",
            Fix(text="Add base=SQSBackoffTask, or set task_cls of the Celery app."),
        )


@_rule(
    "W020",
    "A task retries errors that may mean that it was processed",
    "Retryable is an allow list. A base class such as Exception or RequestException covers"
    " invalid addresses, refusals for good, and timeouts after the request left.",
    is_live=False,
)
def _broad(facts: Facts) -> Iterator[Report]:
    for task in facts.covered:
        broad = sorted(_BROAD.intersection(task.retried_errors))
        if broad:
            yield (
                task.name,
                f"retries {', '.join(broad)}; expected errors after which nothing was processed",
                "A timeout after the request left is retried too: a mail goes out twice, a card is"
                " charged twice.",
                Fix(text="Name the errors, or use a classifier (celery_sqs_backoff.classifiers)."),
            )


@_rule(
    "E037",
    "A task is routed to an exchange",
    "SQS has queues alone. kombu keeps bindings in the memory of each connection, declares that"
    " of the task's queue before it sends, and drops what no binding matches. The patterns of"
    " topic exchanges are not looked at.",
)
def _exchanges(facts: Facts) -> Iterator[Report]:
    if facts.other_broker is not None:
        return
    for task in facts.app.tasks:
        if task.exchange is not None:
            yield (
                task.name,
                f"it is routed to the exchange {task.exchange} with a routing_key that leads to no"
                " queue",
                "What is sent to it by this route is lost, without an error for its sender.",
                Fix(text="Name a queue in the route, and no exchange."),
            )


@_rule(
    "W022",
    "A worker prefetches too much",
    "Messages that a worker holds without running them wait there, while other workers may be"
    " idle.",
    is_live=False,
)
def _prefetch(facts: Facts) -> Iterator[Report]:
    app = facts.app
    if not facts.covered:
        return
    if app.prefetch_multiplier == 0:
        yield (
            "worker_prefetch_multiplier",
            "worker_prefetch_multiplier is 0: no limit",
            "One worker takes all messages of a queue and holds them; others stay idle.",
            Fix(text="Set worker_prefetch_multiplier = 4, or 1 for long tasks."),
        )
    elif app.concurrency and app.prefetch_multiplier * app.concurrency > _MUCH_PREFETCH:
        held = app.prefetch_multiplier * app.concurrency
        yield (
            "worker_prefetch_multiplier",
            f"worker_prefetch_multiplier {app.prefetch_multiplier} x concurrency"
            f" {app.concurrency} = {held} messages per worker; expected at most {_MUCH_PREFETCH}",
            "A deploy gives them all back, and each loses one receive.",
            Fix(text="Lower worker_prefetch_multiplier."),
        )


@_rule(
    "W029",
    "Events or replies are sent, and nobody can read them",
    "Celery's events and remote control need fanout, which SQS does not have:"
    " https://github.com/celery/celery/issues/8348, https://github.com/celery/celery/issues/3280",
    is_live=False,
)
def _unread_messages(facts: Facts) -> Iterator[Report]:
    if facts.app.events:
        yield (
            "worker_send_task_events",
            "worker_send_task_events is on; expected False on SQS",
            "Each task sends events to a queue that no monitor can read.",
            Fix(text="Set worker_send_task_events = False."),
        )
    for url, messages in sorted(facts.other_queues.items()):
        queue = QueueFacts(name=url.rpartition("/")[2], url=url, attributes=None)
        # A queue_name_prefix comes first; kombu makes a hyphen of the dot after "celeryev".
        is_reply, is_event = queue.name.endswith("reply-celery-pidbox"), "celeryev-" in queue.name
        if (is_reply or is_event) and messages >= _PILED_UP:
            setting = "worker_send_task_events" if is_event else "worker_enable_remote_control"
            yield (
                queue.name,
                f"{messages} messages in a queue that nobody reads",
                "Remote control and events do not work on SQS. You pay for what is sent there, and"
                " SQS keeps it until retention deletes it.",
                Fix(
                    aws=f"{aws_sqs('delete-queue', queue)} --queue-url {url}",
                    text=f"Set {setting} = False.",
                ),
            )


@_rule(
    "E024",
    "The store is not shared by the pool's processes",
    "memory:// is for tests and for pools in one process.",
    is_live=False,
)
def _memory_store(facts: Facts) -> Iterator[Report]:
    app = facts.app
    if app.store == "memory" and app.pool == "prefork" and not app.runs_here:
        yield (
            "sqs_backoff['store']",
            "the store is memory:// and the pool is prefork",
            "Each process has guards, steps and locks of its own: two runs hold the same lock.",
            Fix(text="Use redis://, django or dynamodb://."),
        )


@_rule(
    "E025",
    "A guard has no store",
    "A guard remembers which message has passed, for all workers.",
    is_live=False,
)
def _no_store(facts: Facts) -> Iterator[Report]:
    if facts.app.store is None:
        for task in facts.covered:
            if task.needs_store:
                yield (
                    task.name,
                    "the task has a guard, and sqs_backoff['store'] is not set",
                    "Each of its runs fails.",
                    Fix(text="Set sqs_backoff['store'], for example 'redis://host:6379/0'."),
                )


@_rule(
    "E023",
    "The store cannot be used",
    "It was opened and asked for a key that does not exist.",
)
def _store_fails(facts: Facts) -> Iterator[Report]:
    if facts.app.store_failure is not None:
        yield (
            "sqs_backoff['store']",
            f"the store ({facts.app.store}) cannot be used: {facts.app.store_failure}",
            "Tasks with a guard, a step or a lock cannot run; they back off until the store is"
            " back.",
            Fix(text="Check the store's address; with Django, run manage.py migrate."),
        )


@_rule(
    "W034",
    "The store drops records when it is full",
    "Each record has an end, so volatile-* policies drop them too."
    " https://redis.io/docs/latest/develop/reference/eviction/",
)
def _store_evicts(facts: Facts) -> Iterator[Report]:
    if facts.app.store_eviction is not None:
        yield (
            "sqs_backoff['store']",
            facts.app.store_eviction,
            "When it is full it drops guards, locks and steps of messages under way: work is done"
            " twice.",
            Fix(
                text="Set maxmemory-policy noeviction, or use a server beside the cache's:"
                " when that is full, tasks back off."
            ),
        )


RULES: Final = tuple(sorted(_rules, key=lambda rule: rule.id[1:]))

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


def asked(*, live: bool) -> list[Rule]:
    """Return the rules: all, or those that need no facts from SQS or a store."""
    return [rule for rule in RULES if live or not rule.is_live]


def examine(facts: Facts, *, ignore: Collection[str] = (), live: bool = True) -> list[Finding]:
    """Return what is wrong, the worst first.

    Args:
        facts: what was read.
        ignore: ids of rules to leave out, or ``id:subject`` for one subject.
        live: whether to ask the rules that need facts from SQS or a store.
    """
    found = {
        finding: None  # once, of a dead-letter queue that several queues have
        for rule in asked(live=live)
        for finding in rule.findings(facts)
        if finding.id not in ignore and f"{finding.id}:{finding.subject}" not in ignore
    }
    return sorted(found, key=lambda f: (_ORDER[f.severity], f.id, f.subject))

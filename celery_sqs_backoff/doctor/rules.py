"""The rules for queues, dead-letter queues, tasks, settings and permissions.

If a rule is removed, its ID is not used again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

from ..retry.policies import FullJitter
from ..sqs.find_queue import NOT_CREATED, NOT_PREDEFINED
from ..sqs.limits import MAX_MAX_RECEIVE_COUNT
from ..sqs.queues import queue_name
from ..units import in_words
from .facts import ProjectFacts, QueueFacts, TaskFacts
from .finding import Finding, Fix, Report, Rule, Severity, create_queue, set_attribute
from .horizon import DRAWS, estimate_receives, estimate_seconds_to_dead_letter

#: A visibility timeout of this or more counts as long.
_LONG_SECONDS: Final = 3_600

#: The default retention of a queue in SQS, and the longest.
_FOUR_DAYS_SECONDS: Final = 345_600
_FOURTEEN_DAYS_SECONDS: Final = 1_209_600

#: Attribute of the dead-letter queues that the suggested commands create.
_KEPT: Final = f"MessageRetentionPeriod={_FOURTEEN_DAYS_SECONDS}"

#: Exception classes that also cover errors after the work was done. A retry could repeat the work.
_BROAD: Final = frozenset(
    {
        "builtins.BaseException",
        "builtins.Exception",
        "requests.exceptions.RequestException",
        "httpx.HTTPError",
        "httpx.RequestError",
        "botocore.exceptions.BotoCoreError",
        "botocore.exceptions.ClientError",
        "smtplib.SMTPException",
        "urllib.error.URLError",
    }
)

_rules: list[Rule] = []

_Ask: TypeAlias = Callable[[ProjectFacts], Iterable[Report]]

#: Evidence, consequence and fix for one queue; ``None`` = the queue does not have the fault.
_QueueReport: TypeAlias = tuple[str, str, Fix] | None
_AskQueue: TypeAlias = Callable[[QueueFacts, ProjectFacts], _QueueReport]


def _rule(id_: str, *, is_live: bool = True) -> Callable[[_Ask], _Ask]:
    """Return a decorator that turns a function into a rule.

    A rule looks for one fault. The function yields a report for every subject that has the fault.
    The first line of its docstring is the rule's title. The rest is the text of ``sqs-doctor
    --explain``.
    """

    def add(ask: _Ask) -> _Ask:
        title, _, why = inspect.cleandoc(ask.__doc__ or "").partition("\n\n")
        _rules.append(Rule(id_, title.rstrip("."), why, ask, is_live))
        return ask

    return add


def _queue_rule(id_: str) -> Callable[[_AskQueue], _AskQueue]:
    """Return a decorator that turns a check of one queue into a rule.

    The rule calls the function for each queue that workers consume and that could be read. The
    function's docstring is used as in ``_rule``.
    """

    def add(ask: _AskQueue) -> _AskQueue:
        def ask_all(facts: ProjectFacts) -> Iterator[Report]:
            for queue in facts.consumed:
                if (report := ask(queue, facts)) is not None:
                    yield (queue.name, *report)

        ask_all.__doc__ = ask.__doc__
        _rule(id_)(ask_all)
        return ask

    return add


@_queue_rule("E011")
def _visibility_timeout_zero(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """The queue's visibility timeout is 0.

    SQS hides a received message for the visibility timeout, unless the receive asks for another
    time. With a timeout of 0, SQS shows the message again immediately.
    """
    if queue.number("VisibilityTimeout") != 0:
        return None
    return (
        "VisibilityTimeout is 0; expected at least 30 seconds",
        "Workers with this package ask for 30 seconds at each receive. Workers without it do not,"
        " so several of them run the same task at the same time.",
        set_attribute(queue, "VisibilityTimeout", 30),
    )


@_queue_rule("W012")
def _visibility_timeout_long(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """The queue's visibility timeout is long.

    After a worker is killed, its messages stay hidden until the timeout ends. A long task needs no
    long timeout: while the task runs, the worker renews the timeout, for up to 12 hours.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-visibility-timeout.html
    """
    seconds = queue.number("VisibilityTimeout") or 0
    if seconds < _LONG_SECONDS:
        return None
    return (
        f"VisibilityTimeout is {seconds}; expected less than {_LONG_SECONDS}, because workers renew"
        " it for tasks that run longer",
        f"The messages of a killed worker stay hidden for {in_words(seconds)}.",
        set_attribute(queue, "VisibilityTimeout", 30),
    )


@_queue_rule("W015")
def _delay(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """The queue delays every message.

    DelaySeconds of a queue delays each message that has no delay of its own. Celery's countdown and
    retries do not need it.
    """
    if not (seconds := queue.number("DelaySeconds")):
        return None
    return (
        f"DelaySeconds is {seconds}; expected 0",
        f"Each task without a countdown starts {in_words(seconds)} late.",
        set_attribute(queue, "DelaySeconds", 0),
    )


@_queue_rule("W002")
def _no_dead_letter_queue(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """The queue has no dead-letter queue.

    If a task must not be retried again, the worker moves its message to the dead-letter queue.
    There an operator can inspect it, and replay it when the cause is fixed. Without a dead-letter
    queue, the worker deletes the message.
    """
    if facts.covered and not any(task.wants_dlq for task in facts.covered):
        return None
    if queue.dlq_arn is None:
        dlq = _dlq_name(queue)
        arn = f"{queue.arn.rpartition(':')[0]}:{dlq}" if queue.arn else f"ARN of {dlq}"
        fix = _set_redrive_policy(queue, arn)
        return (
            "the queue has no RedrivePolicy; expected one with a dead-letter queue",
            "A message that is given up is deleted, so no one can inspect or replay it.",
            replace(
                fix,
                aws=f"{create_queue(queue, dlq, _KEPT)} && {fix.aws}",
                text=f"In Terraform, add the queue {dlq} too.",
            ),
        )
    return None


def _dlq_name(queue: QueueFacts) -> str:
    name = queue_name(queue.url)
    return f"{name.removesuffix('.fifo')}-dlq{'.fifo' if queue.is_fifo else ''}"


def _set_redrive_policy(queue: QueueFacts, dlq_arn: str | None) -> Fix:
    policy = {"deadLetterTargetArn": dlq_arn, "maxReceiveCount": MAX_MAX_RECEIVE_COUNT}
    return set_attribute(queue, "RedrivePolicy", policy)


@_queue_rule("E004")
def _dead_letter_queue_missing(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """The dead-letter queue does not exist.

    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
    """
    if (dlq := queue.dlq) is None or not dlq.is_missing:
        return None
    return (
        f"the dead-letter queue {dlq.name} does not exist",
        "A message that is given up stays hidden in the queue. The worker tries again to give it up"
        " until SQS deletes it at the end of its retention period.",
        Fix(aws=create_queue(queue, dlq.name, _KEPT)),
    )


@_queue_rule("E006")
def _dead_letter_queue_refuses(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """The dead-letter queue does not take this queue's messages.

    RedriveAllowPolicy of a dead-letter queue can name the queues that may use it, at most 10.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
    """
    dlq = queue.dlq
    if dlq is None:
        return None
    policy = dlq.redrive_allow_policy
    permission = policy.get("redrivePermission", "allowAll")
    allowed = policy.get("sourceQueueArns", [])
    if permission == "denyAll" or (permission == "byQueue" and queue.arn not in allowed):
        return (
            f"RedriveAllowPolicy of {dlq.name} is {permission!r} and does not name {queue.arn}",
            "SQS moves no message from this queue to its dead-letter queue.",
            Fix(text=f"Name {queue.arn} in its sourceQueueArns, or allow all queues."),
        )
    return None


@_queue_rule("W007")
def _dlq_of_dlq(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """The dead-letter queue has a redrive policy of its own.

    Each look at a dead letter counts as a receive. After maxReceiveCount looks, SQS moves the
    message to the next dead-letter queue.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
    """
    if (dlq := queue.dlq) is None or dlq.dlq_arn is None:
        return None
    return (
        f"the dead-letter queue {dlq.name} has a RedrivePolicy itself"
        f" (maxReceiveCount {dlq.max_receive_count})",
        "Looking at its messages, in the console or with sqs-peek, counts as a receive. After"
        " maxReceiveCount receives, SQS moves a message to the next dead-letter queue.",
        set_attribute(dlq, "RedrivePolicy", ""),
    )


@_queue_rule("W008")
def _dead_letters_deleted_early(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """Dead letters are deleted early.

    On standard queues, a message that SQS moves to the dead-letter queue keeps its enqueue
    timestamp. So its time in the first queue counts towards the retention of the dead-letter
    queue. On FIFO queues SQS resets the timestamp. For a FIFO queue, the rule expects a retention
    of at least four days, SQS's default.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
    """
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
            "A message that SQS moves keeps its age. If it was retried for"
            f" {in_words(theirs)}, SQS deletes it as soon as it is a dead letter."
        )
    if theirs < least:
        return (
            f"MessageRetentionPeriod of {dlq.name} is {theirs} seconds; expected {expected}",
            effect,
            set_attribute(dlq, "MessageRetentionPeriod", _FOURTEEN_DAYS_SECONDS),
        )
    return None


@_queue_rule("I033")
def _dlq_unreadable(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """The dead-letter queue cannot be read.

    Workers only send to this queue. So the IAM policy that the docs suggest for workers does not
    allow reading it.
    """
    dlq = queue.dlq
    if dlq is not None and dlq.attributes is None and not dlq.is_missing:
        return (
            f"the dead-letter queue {dlq.name} cannot be read ({dlq.failure})",
            "The doctor could not check whether the queue accepts dead letters, and whether it"
            " keeps them long enough.",
            Fix(text="Run the doctor with sqs:GetQueueAttributes on the dead-letter queue."),
        )
    return None


@_queue_rule("W009")
def _retention_short(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """Retention ends before the retries do.

    SQS deletes a message when its retention period is over, even if the message is hidden. Workers
    give the message up shortly before that time.
    """
    tasks = _find_covered(facts, queue)
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
            " deletes messages of that age.",
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


def _find_covered(facts: ProjectFacts, queue: QueueFacts) -> list[TaskFacts]:
    return [task for task in facts.sent_to(queue) if task.is_covered]


@_queue_rule("W010")
def _few_receives(queue: QueueFacts, facts: ProjectFacts) -> _QueueReport:
    """maxReceiveCount is too small for the delays.

    After maxReceiveCount receives, SQS moves a message to the dead-letter queue at the next
    receive, without a record of the reason. To add the record, a worker itself moves the message at
    the last receive that maxReceiveCount allows. If this number is too small, retries end early. On
    a FIFO queue, fifo_cap makes delays shorter, so a message needs more receives. SQS allows a
    maxReceiveCount of up to 1000.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
    """
    tasks = [task.on_fifo if queue.is_fifo else task for task in _find_covered(facts, queue)]
    allowed = queue.max_receive_count
    if allowed is None or not tasks:
        return None
    # One simulated message of each task shows roughly which task needs the most receives. It would
    # take seconds of CPU to simulate 200 messages of each task.
    task = max(tasks, key=lambda task: _receives_needed(task, draws=1))
    if allowed >= (needed := _receives_needed(task)):
        return None
    cap = f" under its fifo_cap of {task.fifo_cap:g} s" if queue.is_fifo else ""
    return (
        f"maxReceiveCount is {allowed}; 99 of 100 messages of {task.name} need"
        f" {_format_receives(needed)} receives until retry_for or max_retries ends (drawn 200 times"
        f" from its delays{cap})",
        _describe_outage(queue, task, allowed),
        _more_receives(queue, task, allowed, needed),
    )


def _receives_needed(task: TaskFacts, *, draws: int = DRAWS) -> int:
    return estimate_receives(
        task.backoff or FullJitter(),
        retry_for=task.retry_for,
        max_retries=task.max_retries,
        draws=draws,
    )


def _format_receives(needed: int) -> str:
    most = MAX_MAX_RECEIVE_COUNT
    return f"more than {most}" if needed > most else f"up to {needed}"


def _more_receives(queue: QueueFacts, task: TaskFacts, allowed: int, needed: int) -> Fix:
    if needed <= MAX_MAX_RECEIVE_COUNT:
        return _set_redrive_policy(queue, queue.dlq_arn)
    longer = "the fifo_cap" if queue.is_fifo else "the longest delay"
    text = (
        f"SQS allows {MAX_MAX_RECEIVE_COUNT} at the most: raise {longer} of {task.name}, or lower"
        " its retry_for."
    )
    if allowed == MAX_MAX_RECEIVE_COUNT:
        return Fix(text=text)
    return replace(_set_redrive_policy(queue, queue.dlq_arn), text=text)


def _describe_outage(queue: QueueFacts, task: TaskFacts, allowed: int) -> str:
    assert task.backoff is not None
    seconds = estimate_seconds_to_dead_letter(
        task.backoff,
        allowed,
        retry_for=task.retry_for,
        max_retries=task.max_retries,
        retention=queue.retention_seconds or _FOUR_DAYS_SECONDS,
    )
    which = "The first message of each message group" if queue.is_fifo else _messages(queue)
    return (
        f"{which} would be dead-lettered about {in_words(seconds)} into an outage. Deploys and"
        " crashes use up receives, too."
    )


@_rule("E001")
def _queue_missing(facts: ProjectFacts) -> Iterator[Report]:
    """A queue that workers consume does not exist.

    The app names the queue in predefined_queues or task_queues.
    """
    for queue in facts.queues:
        if not (queue.is_consumed and queue.is_missing):
            continue
        evidence = f"the queue does not exist ({queue.failure})"
        consequence = "Workers that consume it receive no messages, and SQS refuses sends to it."
        fix = Fix(
            create_queue(queue, queue_name(queue.url)), text=_hint_at_region(queue) + _NAME_OTHERS
        )
        if queue.failure == NOT_CREATED:
            consequence = (
                "The first worker or sender creates it, if SQS allows that, without a dead-letter"
                " queue. Messages that are given up are then deleted."
            )
        elif queue.failure == NOT_PREDEFINED:
            evidence = "the app consumes the queue, and predefined_queues does not name it"
            consequence = "Workers that consume it do not start, and no task can be sent to it."
            add = "Add it to predefined_queues, or take it out of task_queues. "
            fix = Fix(text=add + _NAME_OTHERS)
        yield queue.name, evidence, consequence, fix


_NAME_OTHERS: Final = (
    "If workers consume other queues (-Q), name them with sqs-doctor -Q, or in task_queues."
)


def _hint_at_region(queue: QueueFacts) -> str:
    """Return a hint that the Region in the queue's URL may be wrong. Empty = no hint."""
    if queue.region is None or queue.failure == NOT_CREATED:
        return ""
    return (
        f"Its URL is in {queue.region}: is that the region in broker_transport_options, or in"
        " predefined_queues? "
    )


@_rule("W036")
def _queue_unchecked(facts: ProjectFacts) -> Iterator[Report]:
    """A queue that tasks go to was not checked.

    Without task_queues, the doctor checks only the default queue of the app. A task's queue,
    task_routes or beat_schedule may name other queues. If workers consume them (-Q), give the
    doctor the same -Q.
    """
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
            f"{first}{f' and {len(more)} more go' if more else ' goes'} to this queue, unless a"
            f" caller names another; checked: {', '.join(sorted(looked_at))}",
            "The settings of this queue were not checked.",
            Fix(text=f"Name the queues of the workers: sqs-doctor -Q {name}, or task_queues."),
        )


@_rule("E027")
def _lacks_permission(facts: ProjectFacts) -> Iterator[Report]:
    """An action is denied.

    The doctor calls DeleteMessage and ChangeMessageVisibility with a receipt handle that does not
    exist. It calls SendMessageBatch on the dead-letter queue without a message. SQS checks
    permissions first, so these calls show denied actions, but affect no message.
    """
    for queue in facts.queues:
        for one, arn in ((queue, queue.arn), (queue.dlq, queue.dlq_arn)):
            if one is not None and one.denied:
                actions = ", ".join(one.denied)
                yield (
                    one.name,
                    f"SQS denies {actions} to the identity that ran the doctor",
                    _consequence(one),
                    Fix(
                        text="If workers run as this identity, allow these actions on"
                        f" {arn or one.name}."
                    ),
                )


def _consequence(queue: QueueFacts) -> str:
    if not queue.is_consumed:
        return (
            "A message that is given up stays hidden in its queue and never becomes a dead letter."
        )
    if "sqs:ChangeMessageVisibility" in queue.denied:
        return "Workers cannot hide messages: no retry is delayed, and long tasks run twice."
    if "sqs:DeleteMessage" in queue.denied:
        return "Every task runs again and again, until maxReceiveCount ends it."
    return "Workers cannot read the settings of the queue, or cannot receive."


@_rule("W019", is_live=False)
def _without_base_class(facts: ProjectFacts) -> Iterator[Report]:
    """A task does not have the base class SQSBackoffTask.

    Such a task keeps Celery's behaviour on SQS. Each retry is a copy with a new message ID. If the
    task fails for good, its message is deleted and never becomes a dead letter.
    """
    if not facts.covered:
        return  # no task has the base class, so the app does not use the package yet
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
            f"Celery's own behaviour applies: {how}, and no dead letter says why it failed.",
            Fix(text="Add base=SQSBackoffTask, or set task_cls of the Celery app."),
        )


@_rule("W020", is_live=False)
def _broad_retry_on(facts: ProjectFacts) -> Iterator[Report]:
    """A task retries errors after which its work may have been done.

    retry_on should list only errors after which a retry is safe. A base class such as Exception or
    RequestException also covers invalid addresses, final refusals, and timeouts after the request
    was sent.
    """
    for task in facts.covered:
        broad = sorted(_BROAD.intersection(task.retried_errors))
        if broad:
            yield (
                task.name,
                f"retries {', '.join(broad)}; expected errors after which nothing was done",
                "A timeout after the request was sent is retried, too: a mail is sent twice, or a"
                " card is charged twice.",
                Fix(text="Name the errors, or use a classifier (celery_sqs_backoff.classifiers)."),
            )


@_rule("E037")
def _routed_to_exchange(facts: ProjectFacts) -> Iterator[Report]:
    """A task is routed to an exchange.

    SQS has queues, but no exchanges. If the route names no queue, kombu binds no queue to the
    exchange, and drops the message.
    """
    for task in facts.app.tasks:
        if task.exchange is not None and facts.other_broker is None:
            yield (
                task.name,
                f"it is routed to the exchange {task.exchange} and to no queue",
                "Messages that are sent over this route are lost, and the sender gets no error.",
                Fix(text="Name a queue in the route, and no exchange."),
            )


@_rule("W029", is_live=False)
def _unread_events(facts: ProjectFacts) -> Iterator[Report]:
    """Tasks send events that no monitor can read.

    Celery's events need fanout, which SQS does not have:
    https://github.com/celery/celery/issues/8348
    """
    if facts.app.events:
        yield (
            "worker_send_task_events",
            "worker_send_task_events is on; expected False on SQS",
            "Each task sends events to a queue that no monitor can read.",
            Fix(text="Set worker_send_task_events = False."),
        )


_STORE: Final = "sqs_backoff['store']"


@_rule("E023", is_live=False)
def _store_unusable(facts: ProjectFacts) -> Iterator[Report]:
    """The store cannot be used.

    Guards, steps, locks and workflows need the store. A worker checks the store at its start. The
    worker ends if the settings are wrong, or if the store lacks a table or a permission. If the
    store does not answer, the worker starts, and retries the tasks that need the store. To check
    the store, the doctor adds, reads, changes and deletes a record, except with --offline.
    """
    app = facts.app
    if app.store_fault is not None:
        yield _STORE, app.store_fault, "Workers do not start.", Fix(text="Correct the setting.")
    if app.store_failure is not None:
        yield (
            _STORE,
            app.store_failure,
            "Tasks with a guard, a step or a lock are retried until the store can be used.",
            Fix(text="Check its address, its table and the rights of its user."),
        )
    for task in facts.covered:
        if not app.has_store and task.needs_store:
            yield (
                task.name,
                "the task has a guard or workflows, and sqs_backoff['store'] is not set",
                "Each of its runs fails.",
                Fix(text="Set sqs_backoff['store'], for example 'redis://host:6379/0'."),
            )


@_rule("W042")
def _store_forgeable(facts: ProjectFacts) -> Iterator[Report]:
    """Records on the store are not signed.

    Without a secret, another user who can write to the store can mark work as done.
    """
    if facts.app.store_forgeable is not None:
        yield (
            _STORE,
            facts.app.store_forgeable,
            "With a forged record, a task is skipped or gets a forged result.",
            Fix(text="Set sqs_backoff['secret'], or SECRET_KEY in Django."),
        )


@_rule("W034")
def _store_evicts(facts: ProjectFacts) -> Iterator[Report]:
    """The store drops records when it is full.

    Redis drops records under an allkeys-* policy. It also drops them under a volatile-* policy,
    because each record has an expiry time.
    https://redis.io/docs/latest/develop/reference/eviction/
    """
    if facts.app.store_eviction is not None:
        yield (
            _STORE,
            facts.app.store_eviction,
            "A full store drops records of guards, locks and steps that are in use. Then work is"
            " done twice.",
            Fix(
                text="Set maxmemory-policy noeviction, if necessary on a separate server. When that"
                " server is full, tasks are retried."
            ),
        )


RULES: Final = tuple(sorted(_rules, key=lambda rule: rule.id[1:]))

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}


def select_rules(*, live: bool) -> list[Rule]:
    """Return all rules, or only the rules that need no facts from SQS or a store."""
    return [rule for rule in RULES if live or not rule.is_live]


def examine(
    facts: ProjectFacts, *, ignore: Collection[str] = (), live: bool = True
) -> list[Finding]:
    """Return the findings, the worst first.

    Args:
        facts: the facts that :func:`.look.look` read.
        ignore: IDs of rules to leave out, or ``ID:subject`` for one subject.
        live: whether to apply the rules that need facts from SQS or a store.
    """
    found = {
        finding: None  # a dict removes duplicates: several queues may share a dead-letter queue
        for rule in select_rules(live=live)
        for finding in rule.findings(facts)
        if finding.id not in ignore and f"{finding.id}:{finding.subject}" not in ignore
    }
    return sorted(found, key=lambda f: (_ORDER[f.severity], f.id, f.subject))

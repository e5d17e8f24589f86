"""The rules of ``celery sqs-doctor``, which looks for faults in the set-up of a project.

A rule has an ID such as ``E001``. Its letter is the severity: error, warning or information.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from celery_sqs_backoff import FullJitter, Policy, Schedule
from celery_sqs_backoff.doctor import (
    RULES,
    AppFacts,
    ProjectFacts,
    QueueFacts,
    Severity,
    TaskFacts,
    examine,
)
from celery_sqs_backoff.doctor.horizon import estimate_receives, estimate_seconds_to_dead_letter
from celery_sqs_backoff.sqs.find_queue import NOT_CREATED
from tests.support.cases import cases

BASE = "https://sqs.eu-central-1.amazonaws.com/123456789012"
ARN = "arn:aws:sqs:eu-central-1:123456789012"


def attributes(name: str, **changed: Any) -> dict[str, str]:
    """Return the answer of GetQueueAttributes for a queue that is set up well."""
    found = {
        "QueueArn": f"{ARN}:{name}",
        "VisibilityTimeout": "30",
        "MessageRetentionPeriod": "345600",
        "DelaySeconds": "0",
        "ApproximateNumberOfMessages": "2500",
        "ApproximateNumberOfMessagesNotVisible": "40",
        "ApproximateNumberOfMessagesDelayed": "0",
        **changed,
    }
    return {key: value for key, value in found.items() if value is not None}


def redrive(dlq: str, count: int = 1000) -> str:
    return json.dumps({"deadLetterTargetArn": f"{ARN}:{dlq}", "maxReceiveCount": count})


def queue(name: str = "mails", *, dlq: QueueFacts | None = None, **changed: Any) -> QueueFacts:
    attributes_of = attributes(name, **{"RedrivePolicy": redrive("mails-dlq"), **changed})
    return QueueFacts(
        name=name,
        url=f"{BASE}/{name}",
        attributes=attributes_of,
        dlq=dead_letters() if dlq is None else dlq,
    )


def dead_letters(name: str = "mails-dlq", **changed: Any) -> QueueFacts:
    return QueueFacts(
        name=name,
        url=f"{BASE}/{name}",
        attributes=attributes(name, **{"MessageRetentionPeriod": "1209600", **changed}),
        is_consumed=False,
    )


TASK = TaskFacts(
    name="shop.send_mail",
    is_covered=True,
    backoff=FullJitter(base=2, cap=3600),
    retry_for=36 * 3600.0,
    retried_errors=("shop.MailProviderDown",),
)
APP = AppFacts(tasks=(TASK,), has_store=True)
WELL = ProjectFacts(app=APP, queues=(queue(),))


def with_queues(*queues: QueueFacts) -> ProjectFacts:
    return replace(WELL, queues=queues)


def with_queue(**changed: Any) -> ProjectFacts:
    return with_queues(queue(**changed))


def with_dlq(**changed: Any) -> ProjectFacts:
    return with_queues(queue(dlq=dead_letters(**changed)))


def unreadable_dlq(**facts: Any) -> QueueFacts:
    return queue(dlq=replace(dead_letters(), attributes=None, **facts))


def with_task(**changed: Any) -> ProjectFacts:
    return replace(WELL, app=replace(APP, tasks=(replace(TASK, **changed),)))


def with_app(**changed: Any) -> ProjectFacts:
    return replace(WELL, app=replace(APP, **changed))


FIFO = QueueFacts(
    name="mails.fifo",
    url=f"{BASE}/mails.fifo",
    attributes=attributes("mails.fifo", RedrivePolicy=redrive("mails-dlq")),
    dlq=dead_letters(),
)


def fifo_project(*, dlq_retention: str) -> ProjectFacts:
    """Return a project with a FIFO queue that keeps messages for SQS's default of 4 days."""
    name, dlq = "mails.fifo", "mails-dlq.fifo"
    right = replace(
        FIFO,
        attributes=attributes(name, RedrivePolicy=redrive(dlq)),
        dlq=dead_letters(dlq, MessageRetentionPeriod=dlq_retention),
    )
    return with_queues(right)


BROKEN = {
    "E001 queue": (
        with_queues(replace(queue(), attributes=None, failure="NonExistentQueue", dlq=None)),
        "E001",
    ),
    "W002 no DLQ": (
        with_queues(replace(queue(RedrivePolicy=None), dlq=None)),
        "W002",
    ),
    "E004 DLQ is gone": (with_queues(unreadable_dlq(failure="NonExistentQueue")), "E004"),
    "E006 denyAll": (
        with_dlq(RedriveAllowPolicy=json.dumps({"redrivePermission": "denyAll"})),
        "E006",
    ),
    "E006 another queue": (
        with_dlq(
            RedriveAllowPolicy=json.dumps(
                {"redrivePermission": "byQueue", "sourceQueueArns": [f"{ARN}:other"]}
            )
        ),
        "E006",
    ),
    "W007 DLQ of the DLQ": (with_dlq(RedrivePolicy=redrive("graveyard", 5)), "W007"),
    "W008 DLQ retention": (with_dlq(MessageRetentionPeriod="345600"), "W008"),
    "W008 DLQ keeps less than SQS's maximum": (
        with_queues(
            queue(
                MessageRetentionPeriod="1209600",
                dlq=dead_letters(MessageRetentionPeriod="345600"),
            )
        ),
        "W008",
    ),
    "W008 FIFO DLQ keeps an hour": (fifo_project(dlq_retention="3600"), "W008"),
    "W009 retention": (with_queue(MessageRetentionPeriod="86400"), "W009"),
    "W010 maxReceiveCount": (with_queue(RedrivePolicy=redrive("mails-dlq", 7)), "W010"),
    "W010 delays too short": (with_task(backoff=FullJitter(base=2, cap=60)), "W010"),
    "W010 queue attributes are no numbers": (
        with_queue(
            RedrivePolicy=redrive("mails-dlq", 7),
            ApproximateNumberOfMessages="many",
            MessageRetentionPeriod="long",
        ),
        "W010",
    ),
    "E011 visibility timeout 0": (with_queue(VisibilityTimeout="0"), "E011"),
    "W012 visibility timeout 12 h": (with_queue(VisibilityTimeout="43200"), "W012"),
    "W015 delay": (with_queue(DelaySeconds="60"), "W015"),
    "W019 no base class": (
        with_app(tasks=(TASK, TaskFacts(name="shop.other", is_covered=False))),
        "W019",
    ),
    "W020 retries everything": (with_task(retried_errors=("builtins.Exception",)), "W020"),
    "E023 store fails": (with_app(store_failure="OperationalError"), "E023"),
    "W034 store evicts": (with_app(store_eviction="maxmemory-policy allkeys-lru"), "W034"),
    "E023 store settings": (
        with_app(store_fault="sqs_backoff['store']: port: expected a number"),
        "E023",
    ),
    "W042 not signed": (with_app(store_forgeable="sqs_backoff['secret'] is missing"), "W042"),
    "E023 guard without a store": (
        with_app(has_store=False, tasks=(replace(TASK, needs_store=True),)),
        "E023",
    ),
    "E027 denied": (
        with_queues(replace(queue(), denied=("sqs:DeleteMessage",))),
        "E027",
    ),
    "E027 DLQ denied": (
        with_queues(queue(dlq=replace(dead_letters(), denied=("sqs:SendMessage",)))),
        "E027",
    ),
    "W029 events": (with_app(events=True), "W029"),
    "I033 DLQ not readable": (with_queues(unreadable_dlq(failure="AccessDenied")), "I033"),
    "W036 not checked": (replace(with_task(queue="bulk"), are_all=True), "W036"),
    "W036 beat's queue": (
        replace(with_task(queue="mails", also_to=("bulk",)), are_all=True),
        "W036",
    ),
    "E037 exchange": (with_task(exchange="media"), "E037"),
}


def test_all_well():
    """The doctor finds nothing in a project that is set up well."""
    assert examine(WELL) == []


@pytest.mark.parametrize(("facts", "expected"), BROKEN.values(), ids=BROKEN.keys())
def test_each_fault(facts, expected):
    """The doctor reports each fault in ``BROKEN``, and nothing else."""
    [finding] = examine(facts)
    assert finding.id == expected
    for text in (finding.subject, finding.evidence, finding.consequence):
        assert text
    assert finding.fix.aws or finding.fix.terraform or finding.fix.text
    assert json.dumps(finding.as_dict())


def test_each_rule_is_tested():
    """Each rule has a case in ``BROKEN``, and no two rules have the same number."""
    assert {expected for _, expected in BROKEN.values()} == {rule.id for rule in RULES}
    numbers = [rule.id[1:] for rule in RULES]
    assert len(numbers) == len(set(numbers))
    for rule in RULES:
        assert rule.why
        assert rule.title


def test_unreadable_queue():
    """The doctor reports nothing about a queue that it could not read."""
    unread = replace(queue(), attributes=None, failure="ServiceUnavailable", dlq=None)
    assert examine(with_queues(unread)) == []


def test_offline_rules():
    """With ``live=False`` the doctor uses only the rules that need no queue."""
    facts = replace(BROKEN["E011 visibility timeout 0"][0], app=with_app(events=True).app)
    assert [f.id for f in examine(facts, live=False)] == ["W029"]


def test_ignored_findings():
    """A user can ignore a rule everywhere, or for one queue only."""
    facts = with_queues(queue(DelaySeconds="9"), queue("bulk", DelaySeconds="9"))
    assert [f.subject for f in examine(facts)] == ["bulk", "mails"]
    assert [f.subject for f in examine(facts, ignore=["W015:bulk"])] == ["mails"]
    assert examine(facts, ignore=["W015"]) == []


def test_the_worst_comes_first():
    """The doctor lists the worst findings first."""
    dlq = replace(dead_letters(), attributes=None, failure="AccessDenied")
    facts = with_queues(queue(DelaySeconds="9", VisibilityTimeout="0", dlq=dlq))
    assert [f.severity for f in examine(facts)] == [
        Severity.ERROR,
        Severity.WARNING,
        Severity.INFO,
    ]


def test_small_max_receive_count():
    """The doctor says after how long an outage a small ``maxReceiveCount`` is used up.

    Here 2,500 messages wait on the queue. Each has 7 retries, 30 seconds apart.
    """
    facts = replace(
        with_queue(RedrivePolicy=redrive("mails-dlq", 8)),
        app=replace(APP, tasks=(replace(TASK, backoff=Schedule([30])),)),
    )
    [finding] = examine(facts)
    assert "2500 messages would be dead-lettered about 3.5 minutes into an outage" in (
        finding.consequence
    )


def test_failing_policy():
    """If a user's delay policy raises, the doctor computes with ``FullJitter()``.

    A worker too uses ``FullJitter()`` then.
    """

    class ThreeDelays(Policy):
        def ceiling(self, attempt):
            return (1.0, 5.0, 60.0)[attempt - 1]

    facts = replace(
        with_queue(RedrivePolicy=redrive("mails-dlq", 8)),
        app=replace(APP, tasks=(replace(TASK, backoff=ThreeDelays()),)),
    )
    assert [finding.id for finding in examine(facts)] == ["W010"]


@pytest.mark.parametrize(
    ("mine", "theirs"), [("1209600", "1209600"), ("345600", "1209600"), ("60", "61")]
)
def test_long_kept_dead_letters(mine, theirs):
    """The doctor accepts a dead-letter queue that keeps messages longer than the source queue.

    If both queues keep messages for SQS's maximum of 14 days, the doctor accepts that too.
    """
    dlq = dead_letters(MessageRetentionPeriod=theirs)
    facts = with_queues(queue(MessageRetentionPeriod=mine, dlq=dlq))
    assert [f.id for f in examine(facts) if f.id != "W009"] == []


def test_fifo_dlq_retention():
    """A FIFO queue and its dead-letter queue may have the same retention.

    When SQS moves a message to a FIFO dead-letter queue, the message's age starts again at 0.
    """
    assert "W008" not in {f.id for f in examine(fifo_project(dlq_retention="345600"))}


def fifo_with_receives(receives: int, **changed: Any) -> ProjectFacts:
    facts = with_task(fifo_cap=300.0, **changed)
    name, dlq = "mails.fifo", "mails-dlq.fifo"
    found = replace(
        FIFO,
        attributes=attributes(name, RedrivePolicy=redrive(dlq, receives)),
        dlq=dead_letters(dlq),
    )
    return replace(facts, queues=(found, *WELL.queues))


def test_delays_under_fifo_cap():
    """For a FIFO queue, the doctor computes with delays of at most ``fifo_cap``.

    The task may be retried for 36 hours. With delays of up to 300 seconds, 100 receives are used
    up after 4 hours.
    """
    [found] = examine(fifo_with_receives(100))
    assert (found.id, found.subject) == ("W010", "mails.fifo")
    assert "up to 914 receives" in found.evidence
    assert "under its fifo_cap of 300 s" in found.evidence
    assert "about 3.8 hours into an outage" in found.consequence
    assert examine(fifo_with_receives(1000)) == []


def test_fifo_cap_too_short():
    """The doctor asks for a higher ``fifo_cap`` if even 1,000 receives are too few.

    SQS allows no more than 1,000.
    """
    [found] = examine(fifo_with_receives(1000, retry_for=72 * 3600.0))
    assert "raise the fifo_cap of shop.send_mail" in found.fix.text


@cases(
    "long_tasks_queue expected",
    {
        "long task goes to another queue": ("reports", []),
        "long task goes to this queue": ("mails", ["W009", "W010"]),
        "long task goes to the default queue": ("celery", []),
        "long task may go anywhere": (None, ["W009", "W010"]),
    },
)
def test_queue_fits_its_tasks(long_tasks_queue, expected):
    """The doctor judges a queue by the tasks that are sent to it.

    A task that gives up early needs few receives and a short retention. A task that retries for
    36 hours needs more of both.
    """
    brief = replace(TASK, name="shop.ping", queue="mails", max_retries=3, retry_for=600.0)
    app = replace(APP, tasks=(brief, replace(TASK, queue=long_tasks_queue)))
    mails = queue(RedrivePolicy=redrive("mails-dlq", 7), MessageRetentionPeriod="86400")
    facts = replace(WELL, app=app, queues=(mails, queue("reports")))
    assert [f.id for f in examine(facts)] == expected


def test_queue_without_route():
    """If no route names a queue and each task has a route, the doctor judges it by all tasks.

    A caller may send any of the tasks to this queue.
    """
    facts = with_queue(RedrivePolicy=redrive("mails-dlq", 7))
    app = with_task(queue="bulk").app
    assert [f.id for f in examine(replace(facts, app=app))] == ["W010"]


def test_tasks_without_route():
    """If no route names a queue, the doctor judges it by the tasks that have no route."""
    brief = replace(TASK, name="shop.ping", queue="celery", max_retries=3, retry_for=600.0)
    facts = with_queue(RedrivePolicy=redrive("mails-dlq", 7))
    app = replace(APP, tasks=(brief, replace(TASK, queue="bulk")))
    assert examine(replace(facts, app=app)) == []


def test_missing_fifo_queue():
    """For a missing FIFO queue, the doctor shows a command that creates a FIFO queue."""
    facts = replace(FIFO, attributes=None, failure="NonExistentQueue", dlq=None)
    [found] = examine(with_queues(facts))
    assert found.fix.aws.endswith("--queue-name mails.fifo --attributes FifoQueue=true")


def test_task_without_dlq():
    """A queue needs no dead-letter queue if its tasks delete the messages that they give up."""
    facts = replace(BROKEN["W002 no DLQ"][0], app=with_task(wants_dlq=False).app)
    assert examine(facts) == []


def test_retry_for_beyond_retention():
    """The doctor asks for a shorter ``retry_for`` if SQS cannot keep messages that long.

    The queue already has the longest retention, so the doctor shows no command to change it.
    """
    facts = with_queue(MessageRetentionPeriod="1209600")
    app = with_task(retry_for=1209600.0).app
    [found] = [f for f in examine(replace(facts, app=app)) if f.id == "W009"]
    assert (found.fix.aws, found.fix.terraform) == ("", "")
    assert "lower the retry_for of shop.send_mail" in found.fix.text


def test_region_of_missing_queue():
    """The doctor's command creates a missing queue in the Region that its URL names.

    Without a region in the settings, kombu looks in us-east-1, whatever the URL says.
    """
    [found] = examine(BROKEN["E001 queue"][0])
    assert found.fix.aws == "aws sqs create-queue --region eu-central-1 --queue-name mails"
    assert found.fix.text.startswith("Its URL is in eu-central-1: is that the region in")
    absent = replace(queue(), url="mails", attributes=None, failure="QueueDoesNotExist", dlq=None)
    [found] = examine(with_queues(absent))
    assert found.fix.aws == "aws sqs create-queue --queue-name mails"
    assert found.fix.text.startswith("If workers consume other queues")


@pytest.mark.parametrize("name", ["W002 no DLQ", "E004 DLQ is gone", "W015 delay"])
def test_commands_name_region(name):
    """Each ``aws`` command that the doctor shows names the Region."""
    [found] = examine(BROKEN[name][0])
    for line in found.fix.aws.split(" && "):
        assert line.split()[3:5] == ["--region", "eu-central-1"]


def test_commands_name_dlq():
    """The doctor's fixes name the dead-letter queue by its ARN."""
    [missing] = examine(BROKEN["W002 no DLQ"][0])
    assert f"{ARN}:mails-dlq" in missing.fix.aws
    found = examine(
        with_queues(unreadable_dlq(failure="AccessDenied", denied=("sqs:SendMessage",)))
    )
    [denied] = [f for f in found if f.id == "E027"]
    assert f"on {ARN}:mails-dlq." in denied.fix.text


def test_queue_without_url():
    """If no URL is known, the doctor's command names the Region in which the doctor looked.

    Without it, the AWS CLI could create the queue in another Region.
    """
    absent = QueueFacts(
        name="mails",
        url="mails",
        attributes=None,
        failure=NOT_CREATED,
        client_region="eu-central-1",
    )
    [found] = examine(with_queues(absent))
    assert found.fix.aws == "aws sqs create-queue --region eu-central-1 --queue-name mails"
    assert "Its URL" not in found.fix.text


def test_shared_dlq():
    """If two queues share a dead-letter queue, the doctor reports its fault once."""
    dlq = replace(dead_letters(), denied=("sqs:SendMessage",))
    found = examine(with_queues(queue(dlq=dlq), queue("bulk", dlq=dlq)))
    assert [(f.id, f.subject) for f in found] == [("E027", "mails-dlq")]


@pytest.mark.parametrize(
    ("name", "attributes", "argument"),
    [
        ("W015 delay", {"DelaySeconds": "0"}, "delay_seconds = 0"),
        (
            "W010 maxReceiveCount",
            {"RedrivePolicy": redrive("mails-dlq")},
            f"redrive_policy = jsonencode({redrive('mails-dlq')})",
        ),
        ("W007 DLQ of the DLQ", {"RedrivePolicy": ""}, 'redrive_policy = ""'),
    ],
)
def test_fix_has_two_lines(name, attributes, argument):
    """The ``aws`` command and the Terraform line of a fix set the same value."""
    [found] = examine(BROKEN[name][0])
    assert found.fix.aws.endswith(f" --attributes '{json.dumps(attributes)}'")
    assert found.fix.terraform == argument


def test_receives_for_budget():
    """The doctor computes how many receives ``retry_for`` and ``max_retries`` need, up to 1,000."""
    policy = FullJitter(base=2, cap=3600)
    needed = estimate_receives(policy, retry_for=36 * 3600, max_retries=None)
    assert 85 < needed < 110
    assert estimate_receives(policy, retry_for=None, max_retries=4) == 5
    assert estimate_receives(policy, retry_for=None, max_retries=None) == 1000


def test_delays_too_short():
    """The doctor asks for longer delays if even 1,000 receives are too few.

    SQS allows no more than 1,000. The task may be retried for 36 hours, and with delays of up to
    60 seconds 1,000 receives are used up after 8 hours.
    """
    [found] = examine(with_task(backoff=FullJitter(base=2, cap=60)))
    assert "need more than 1000 receives" in found.evidence
    assert "into an outage" in found.consequence
    assert found.fix.aws == ""
    assert "raise the longest delay of shop.send_mail" in found.fix.text
    endless = {"retry_for": None, "max_retries": None}
    assert examine(with_task(backoff=FullJitter(base=2, cap=60), **endless)) == []


@cases(
    "backoff receives expected_range",
    {
        "seven delays of 30 s": (Schedule([30]), 8, (210, 214)),
        "no retry at all": (Schedule([30]), 1, (0, 2)),
        "full jitter": (FullJitter(base=2, cap=3600), 7, (40, 100)),
    },
)
def test_time_to_dead_letter(backoff, receives, expected_range):
    """The doctor computes after how long an outage messages become dead letters."""
    found = estimate_seconds_to_dead_letter(
        backoff, receives, retry_for=36 * 3600, max_retries=None, retention=345_600
    )
    assert expected_range[0] <= found <= expected_range[1]


def test_queue_not_checked():
    """The doctor reports a queue to which tasks are sent but which it did not check.

    If the app has no ``task_queues``, it does not know which queues workers consume with ``-Q``.
    """
    tasks = [replace(TASK, name=f"shop.mail_{n}", queue="bulk") for n in range(3)]
    app = replace(APP, tasks=(TASK, replace(TASK, name="shop.ping", queue="mails"), *tasks))
    [found] = examine(replace(WELL, app=app, are_all=True))
    assert (found.id, found.subject) == ("W036", "bulk")
    assert found.evidence == (
        "shop.mail_0 and 2 more go to this queue, unless a caller names another; checked: mails"
    )
    assert "-Q bulk" in found.fix.text
    assert examine(replace(WELL, app=app)) == [], "queues that the user names are chosen on purpose"


def test_exchange_of_other_broker():
    """The doctor accepts a task's exchange if the app's broker is not SQS."""
    facts = replace(with_task(exchange="media"), other_broker="amqp", queues=())
    assert examine(facts) == []

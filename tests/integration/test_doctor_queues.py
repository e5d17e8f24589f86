"""The doctor finds the fault of each queue in a project with many queues, and nothing else."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from celery import Celery
from kombu import Queue

from celery_sqs_backoff.doctor import Finding, Severity, examine
from celery_sqs_backoff.doctor.look import look
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.testing import LocalQueue, local_sqs_client, local_sqs_settings
from tests.support.doctored import doctored_app
from tests.support.fault_proxy import http_error
from tests.support.queue_names import queue_name
from tests.support.servers import server_name

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient

FOURTEEN_DAYS = "1209600"


class Made:
    """A queue and its dead-letter queue that are set up well, until a test breaks them."""

    def __init__(self, sqs: SQSClient, stem: str, *, suffix: str = "") -> None:
        self.sqs = sqs
        self.suffix = suffix
        self.dlq_url, self.dlq_arn = self.create(f"{stem}-dlq", retention=FOURTEEN_DAYS)
        self.url, self.arn = self.create(stem)
        self.name = stem + suffix
        self.redrive(self.dlq_arn, 1000)

    def create(self, name: str, *, retention: str = "345600") -> tuple[str, str]:
        """Create a queue, and return its URL and ARN."""
        attributes: Any = {"MessageRetentionPeriod": retention}
        if self.suffix:
            attributes["FifoQueue"] = "true"
        url = self.sqs.create_queue(QueueName=name + self.suffix, Attributes=attributes)["QueueUrl"]
        CREATED.append((self.sqs, url))
        found = self.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
        return url, found["Attributes"]["QueueArn"]

    def set(self, *, url: str | None = None, **attributes: Any) -> None:
        """Set attributes of the queue."""
        self.sqs.set_queue_attributes(QueueUrl=url or self.url, Attributes=attributes)

    def set_dlq(self, **attributes: Any) -> None:
        """Set attributes of the dead-letter queue."""
        self.set(url=self.dlq_url, **attributes)

    def redrive(self, arn: str, count: int) -> None:
        """Set the redrive policy."""
        policy = {"deadLetterTargetArn": arn, "maxReceiveCount": str(count)}
        self.set(RedrivePolicy=json.dumps(policy))


CREATED: list[tuple[Any, str]] = []


@dataclass(frozen=True)
class Way:
    """One way to break a queue, and the rule that finds it."""

    rule: str
    break_it: Callable[[Made], object]
    suffix: str = ""
    #: Servers on which this cannot be tested: they refuse the change, or do not show the attribute.
    not_on: frozenset[str] = frozenset()


#: One or two faults for each kind of attribute. The unit tests have a table of all rules.
WAYS = {
    "queue deleted": Way("E001", lambda m: m.sqs.delete_queue(QueueUrl=m.url)),
    "DLQ deleted": Way("E004", lambda m: m.sqs.delete_queue(QueueUrl=m.dlq_url)),
    "DLQ denies all": Way(
        "E006",
        lambda m: m.set_dlq(RedriveAllowPolicy='{"redrivePermission": "denyAll"}'),
        not_on=frozenset({"moto"}),
    ),
    "DLQ keeps a minute": Way("W008", lambda m: m.set_dlq(MessageRetentionPeriod="60")),
    "keeps 5 minutes": Way("W009", lambda m: m.set(MessageRetentionPeriod="300")),
    "3 receives": Way("W010", lambda m: m.redrive(m.dlq_arn, 3)),
    "hidden for 12 hours": Way("W012", lambda m: m.set(VisibilityTimeout="43200")),
    "delayed a minute": Way("W015", lambda m: m.set(DelaySeconds="60")),
    "FIFO with 3 receives": Way("W010", lambda m: m.redrive(m.dlq_arn, 3), ".fifo"),
}


@pytest.fixture(autouse=True)
def clean_up():
    CREATED.clear()
    yield
    for sqs, url in CREATED:
        with suppress(ClientError):
            sqs.delete_queue(QueueUrl=url)


@pytest.fixture
def app():
    """An app whose task needs at most 21 receives: one every 30 seconds, for ten minutes."""
    with doctored_app() as made:
        yield made


def consume(app: Celery, endpoint: str, queues: list[Made]) -> None:
    """Let the app's workers consume these queues."""
    local = [LocalQueue(name=q.name, url=q.url, arn=q.arn, dlq=None) for q in queues]
    app.conf.update(local_sqs_settings(endpoint, *local))
    app.conf.task_queues = [Queue(queue.name) for queue in queues]


def diagnose(app: Celery) -> dict[str, list[str]]:
    """Return the IDs of the rules that found a fault, by queue or task."""
    found: dict[str, list[str]] = defaultdict(list)
    finding: Finding
    for finding in examine(look(app)):
        found[finding.subject].append(finding.id)
    return dict(found)


def test_each_fault(app, sqs_endpoint):
    """The doctor finds each fault of a queue, and nothing about queues that are set up well."""
    find_each(app, sqs_endpoint, server_name())


def test_each_fault_on_moto(app, sqs_server):
    """The doctor finds the same faults on moto."""
    find_each(app, sqs_server, "moto")


def find_each(app: Celery, endpoint: str, server: str) -> None:
    sqs = local_sqs_client(endpoint)
    right = [Made(sqs, queue_name("right"), suffix=suffix) for suffix in ("", ".fifo")]
    broken: dict[str, Made] = {}
    ways = {what: way for what, way in WAYS.items() if server not in way.not_on}
    for what, way in ways.items():
        broken[what] = Made(sqs, queue_name("broken"), suffix=way.suffix)
        way.break_it(broken[what])
    consume(app, endpoint, [*right, *broken.values()])
    found = diagnose(app)
    assert {what: found.get(made.name) for what, made in broken.items()} == {
        what: [way.rule] for what, way in ways.items()
    }
    assert set(found) == {made.name for made in broken.values()}, "a good queue has a finding"


def test_no_right_to_dead_letter(app, sqs, proxy):
    """The doctor finds that a worker is not allowed to send dead letters."""
    made = Made(sqs, queue_name("denied"))
    consume(app, proxy.endpoint, [made])
    proxy.inject(http_error(403, "AccessDenied", actions=["SendMessageBatch"]))
    [finding] = examine(look(app))
    assert (finding.id, finding.subject) == ("E027", made.dlq_url.rpartition("/")[2])
    assert "sqs:SendMessage" in finding.evidence
    assert "never becomes a dead letter" in finding.consequence


def test_policy_of_the_docs(app, sqs, sqs_endpoint, monkeypatch):
    """With the worker's policy from the docs, the doctor reports no error.

    The policy allows a worker to send to the dead-letter queue, but not to read its attributes.
    """
    made = Made(sqs, queue_name("right"))
    consume(app, sqs_endpoint, [made])
    read = Calls.attributes

    def attributes(calls, *names):
        if calls.queue_url == made.dlq_url:
            return Failure(Kind.DENIED, "AccessDenied")
        return read(calls, *names)

    monkeypatch.setattr(Calls, "attributes", attributes)
    [finding] = examine(look(app))
    assert (finding.id, finding.severity) == ("I033", Severity.INFO)

"""``celery sqs-simulate``: options, output, exit codes, and a live queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner, Result

from celery_sqs_backoff import FullJitter, SQSBackoffTask
from celery_sqs_backoff.commands import simulate
from celery_sqs_backoff.commands.exit_codes import DONE, UNREACHABLE, USAGE
from celery_sqs_backoff.testing import LocalQueue, local_sqs_settings

if TYPE_CHECKING:
    from mypy_boto3_sqs.client import SQSClient


@pytest.fixture
def app(sqs_endpoint: str, queue: LocalQueue) -> Iterator[Celery]:
    made = Celery("simulated", set_as_current=False)
    made.conf.update(local_sqs_settings(sqs_endpoint, queue))
    made.conf.sqs_backoff = {"retry_for": 7200.0}

    @made.task(
        name="mails.send",
        shared=False,
        base=SQSBackoffTask,
        backoff=FullJitter(cap=60),
        retry_for=600,
    )
    def send() -> None: ...

    @made.task(name="mails.plain", shared=False)
    def plain() -> None: ...

    yield made
    made.close()


@pytest.fixture
def run(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        monkeypatch.setattr("celery.bin.celery.find_app", lambda name: app)
        return CliRunner().invoke(celery, ["-A", "shop", "sqs-simulate", *arguments])

    return run


def test_strategies_side_by_side(run: Callable[..., Result]) -> None:
    """The policy alone and with a provider; progress goes to stderr."""
    result = run("--outage", "10m")
    assert result.exit_code == DONE
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["full-jitter", "provider"]
    assert len(next(row for row in rows if "wasted" in row).split()) == 4 + 2
    assert "simulating provider" in result.stderr
    assert "simulating" not in result.stdout


def test_json_is_on_stdout_alone(run: Callable[..., Result]) -> None:
    result = run("--outage", "5m", "--messages", "2/s", "--json", "--seed", "3")
    shown = json.loads(result.stdout)["results"]
    assert [figures["strategy"] for figures in shown] == ["full-jitter", "provider"]
    assert 500 < shown[0]["messages"] < 700


def test_the_options_are_those_of_the_app_or_of_a_task(run: Callable[..., Result]) -> None:
    """A task's retry_for of ten minutes does not survive an outage of twenty; the app's does."""
    arguments = ("--outage", "20m", "--json")
    app_wide, _ = json.loads(run(*arguments).stdout)["results"]
    own, _ = json.loads(run(*arguments, "--task", "mails.send").stdout)["results"]
    assert app_wide["dead"] == {}
    assert own["dead"]


def test_a_picture(run: Callable[..., Result], tmp_path: Path) -> None:
    """--plot writes the picture beside the table."""
    picture = tmp_path / "short.svg"
    result = run("--outage", "2m", "--plot", str(picture))
    assert result.exit_code == DONE
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--call", "0"], "above 0"),
        (["--outage", "soon"], "--outage"),
        (["--capacity", "0"], "invalid --capacity"),
        (["--outage", "1m", "--plot", "/no/such/place/x.svg"], "No such file"),
        (["--task", "mails.none"], "no task 'mails.none'"),
        (["--task", "mails.plain"], "not based on SQSBackoffTask"),
        (["--outage", "1m", "--plot", "x.text"], "not supported"),
    ],
    ids=" ".join,
)
def test_wrong_options_are_a_usage_error(
    run: Callable[..., Result], arguments: list[str], words: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == USAGE
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_live_queue(run: Callable[..., Result], queue: LocalQueue, sqs: SQSClient) -> None:
    for _ in range(3):
        sqs.send_message(QueueUrl=queue.url, MessageBody="{}")
    result = run("--live", queue.name, "--task", "mails.send", "--json")
    assert result.exit_code == DONE
    found = json.loads(result.stdout)
    assert found["messages"] == 3
    assert 0 < found["first"] <= 600
    assert sum(found["reasons"].values()) == 3
    text = run("--live", queue.name, "--task", "mails.send").stdout
    assert "the first message gives up in" in text
    assert sum(int(n) for n in _counts(sqs, queue)) == 3, "looking changes nothing"


def test_messages_of_a_provider_wait_behind_its_gate(
    app: Celery, run: Callable[..., Result], queue: LocalQueue, sqs: SQSClient
) -> None:
    """They are received less often, so the queue's maxReceiveCount lasts longer."""
    dlq = sqs.create_queue(QueueName=f"{queue.name}-given-up")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dlq, AttributeNames=["QueueArn"])["Attributes"]
    policy = json.dumps({"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": "8"})
    sqs.set_queue_attributes(QueueUrl=queue.url, Attributes={"RedrivePolicy": policy})
    for _ in range(12):
        sqs.send_message(QueueUrl=queue.url, MessageBody="{}")
    first = []
    for provider in (None, "mail"):
        app.conf.sqs_backoff = {"retry_for": 43_200.0, "provider": provider}
        first.append(
            json.loads(run("--live", queue.name, "--workers", "1", "--json").stdout)["first"]
        )
    sqs.delete_queue(QueueUrl=dlq)
    assert first[1] > 2 * first[0], first


def _counts(sqs: SQSClient, queue: LocalQueue) -> list[str]:
    found = sqs.get_queue_attributes(
        QueueUrl=queue.url,
        AttributeNames=["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"],
    )
    return [*found["Attributes"].values()]


def test_a_queue_that_is_not_there(run: Callable[..., Result]) -> None:
    result = run("--live", "no-such-queue")
    assert result.exit_code == USAGE
    assert "no-such-queue" in result.stderr


def test_what_keeps_a_look_from_a_live_queue_is_named(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore raises more than its own errors, of credentials that stay expired for example."""

    def fails(app: Celery) -> None:
        raise RuntimeError("Credentials were refreshed, but the refreshed ones are still expired")

    monkeypatch.setattr(simulate, "connection_to_look", fails)
    result = run("--live", "mails")
    assert result.exit_code == UNREACHABLE
    assert "cannot read queue mails: " in result.stderr

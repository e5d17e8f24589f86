"""``celery sqs-redrive`` and ``sqs-peek``, as a person or a script runs them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff.commands import exit_codes
from celery_sqs_backoff.commands.redrive_shell import exit_code
from celery_sqs_backoff.redrive import Ended, RedriveReport
from tests.integration.redrive_stage import RedriveStage, record, task
from tests.support.processes import eventually

from .stage import app_of_this_module

app = app_of_this_module()


@pytest.fixture
def stage(sqs, proxy, queue):
    return RedriveStage(sqs, proxy.endpoint, queue)


@pytest.fixture
def run(stage, tmp_path):
    """Return a function that runs ``celery -A <the stage's app> ...`` in this process."""

    def run(*arguments, answer=None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
            patch.setattr("celery.bin.celery.find_app", lambda name: stage.app)
            return CliRunner().invoke(celery, ["-A", "stage", *arguments], input=answer)

    return run


def settings_of(stage: RedriveStage) -> dict[str, Any]:
    """Return the settings of the stage's app that an app in another process needs."""
    names = ("broker_url", "broker_transport_options", "task_default_queue")
    return {name: stage.app.conf[name] for name in names}


def start(
    settings: dict[str, Any], state: Path, *arguments: str, **streams: Any
) -> subprocess.Popen[bytes]:
    """Run ``celery`` in a process of its own, on an app with these settings."""
    own = {"TEST_APP_SETTINGS": json.dumps(settings), "XDG_STATE_HOME": str(state)}
    return subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", __name__, *arguments],
        # Python buffers its output, so the command must still write some of it when it ends.
        env=os.environ | own | {"PYTHONUNBUFFERED": ""},
        **streams,
    )


# What the commands show


def test_peek(stage, run):
    """``sqs-peek`` shows histograms and no arguments, and gives the messages back."""
    stage.fill(task("mails.send"), MessageAttributes=record(first_received_at=time.time()))
    result = run("sqs-peek", stage.dlq.name)
    assert result.exit_code == 0
    for text in (
        "1 message, 1 looked at",
        "mails.send",
        "retry_for is over",
        "under 1 h",
        "expires in 3 d",
    ):
        assert text in result.stdout
    assert "given back" in result.stderr
    assert "W1td" not in result.output


def test_peek_with_arguments(stage, run):
    """``sqs-peek`` shows arguments only with ``--arguments``.

    Of a body that is not JSON, it shows the whole body.
    """
    stage.fill(task(), task().replace("application/json", "application/x-python-serialize"))
    result = run("sqs-peek", stage.dlq.name, "--arguments")
    assert "[[], {}]" in result.stdout
    assert "application/x-python-serialize" in result.stdout


def test_peek_as_json(stage, run):
    """``sqs-peek --json`` prints one object, without the bodies."""
    stage.fill(task("mails.send"), task("sms.send"))
    result = run("sqs-peek", stage.dlq.name, "--json", "--task", "mails.*")
    plan = json.loads(result.stdout)
    assert (plan["messages"], plan["matching"], len(plan["messages_looked_at"])) == (2, 1, 1)
    assert "body" not in plan["messages_looked_at"][0]


def test_dry_run(stage, run):
    """A dry run moves no message, and says how long the redrive would take."""
    stage.fill_numbered(12)
    result = run("sqs-redrive", stage.dlq.name, "--dry-run", "--rate", "2/s")
    assert result.exit_code == exit_codes.DONE
    assert "takes about 6 s" in result.stdout
    assert "received once more, which SQS counts" in result.stderr
    assert sum(stage.bodies(stage.dlq).values()) == 12
    assert not stage.bodies(stage.queue)


def test_restore_then_redrive(stage, run, tmp_path):
    """A user can restore a deleted archive, and then redrive its messages.

    The restore undoes ``--delete``: it puts the messages back on the dead-letter queue.
    """
    bodies = stage.fill_numbered(12)
    archive = str(tmp_path / "a.jsonl")
    run("sqs-redrive", stage.dlq.name, "--delete", "--dump", archive, "--yes")
    asked = run("sqs-redrive", stage.dlq.name, "--restore", archive, answer="n\n")
    assert f"Put the messages of {archive} back" in asked.stderr
    restored = run("sqs-redrive", stage.dlq.name, "--restore", archive, "--yes")
    assert restored.exit_code == exit_codes.DONE, restored.output
    assert f"12 of 12 put back on {stage.dlq.name}." in restored.stdout
    again = run("sqs-redrive", stage.dlq.name, "--restore", archive, "--yes")
    assert f"12 had been put back by an earlier run, as {archive}.restored says." in again.stdout
    assert run("sqs-redrive", stage.dlq.name, "--yes").exit_code == exit_codes.DONE
    assert stage.bodies(stage.queue) == Counter(bodies)


# Questions before a redrive


@pytest.mark.parametrize(
    ("answer", "code", "left"), [("y\n", exit_codes.DONE, 0), ("n\n", exit_codes.INTERRUPTED, 3)]
)
def test_asks_first(stage, run, answer, code, left):
    """A redrive looks at the queue and asks before it sends."""
    stage.fill_numbered(3)
    result = run("sqs-redrive", stage.queue.name, answer=answer)
    assert result.exit_code == code
    assert "Send 3 messages, as fast as SQS takes them? There is no undo." in result.stderr
    assert sum(stage.bodies(stage.dlq).values()) == left


@pytest.mark.parametrize(
    ("expired", "question"),
    [
        ("leave", "Send 2 messages, as fast as SQS takes them? There is no undo."),
        ("extend", "Send 3 messages, as fast"),
    ],
)
def test_question_counts_sends(stage, run, expired, question):
    """The question counts the messages that the redrive would send."""
    mark = {"DataType": "String", "StringValue": '{"replays":3,"run":"x"}'}
    stage.fill(task(), task(), task(expires="2020-01-01T00:00:00+00:00"))
    stage.fill("poison", MessageAttributes={"celery-sqs-backoff-replay": mark})
    result = run("sqs-redrive", stage.dlq.name, "--expired", expired, answer="n\n")
    assert question in result.stderr


def test_question_of_delete(stage, run, tmp_path):
    """With ``--delete``, the question says DELETE in capitals."""
    stage.fill_numbered(3)
    archive = str(tmp_path / "a")
    result = run("sqs-redrive", stage.dlq.name, "--delete", "--dump", archive, answer="y\n")
    assert result.exit_code == exit_codes.DONE
    assert "DELETE, without sending, 3 messages?" in result.stderr
    assert not stage.bodies(stage.queue)


# Exit codes


@pytest.mark.parametrize(
    "arguments",
    [
        ["QUEUE", "--rate", "fast"],
        ["QUEUE", "--ramp", "10m"],
        ["QUEUE", "--spread", "16m"],
        ["QUEUE", "--delete"],
        ["no-such-queue"],
        ["QUEUE", "--no-such-option"],
        ["QUEUE", "--id", ""],
        ["QUEUE", "--restore", __file__, "--rate", "1/s"],
        ["QUEUE", "--restore", __file__, "--task", "x"],
        ["QUEUE", "--restore", __file__, "--dry-run"],
        [],
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_usage(stage, run, arguments):
    """A wrong option or an unknown queue ends with a usage error, and no message moves."""
    stage.fill_numbered(1)
    arguments = [stage.dlq.name if a == "QUEUE" else a for a in arguments]
    result = run("sqs-redrive", "--yes", *arguments)
    assert result.exit_code == exit_codes.USAGE
    assert result.stderr.lstrip().startswith(("Error:", "Usage:")), "a progress bar came first"
    assert sum(stage.bodies(stage.dlq).values()) == 1


def test_unreachable(stage, run, proxy):
    """The commands end with their own exit code when they cannot reach SQS."""
    proxy.unreachable()
    for command in (["sqs-redrive", "--yes"], ["sqs-peek"]):
        assert run(*command, stage.dlq.name).exit_code == exit_codes.UNREACHABLE


def test_too_slow_rate(stage, run):
    """A redrive refuses a rate at which messages would expire first, except with ``--force``."""
    stage.fill_numbered(10)
    slow = ["sqs-redrive", stage.dlq.name, "--dry-run", "--rate", "1/h", "--force"]
    assert run(*slow).exit_code == exit_codes.DONE
    stage.sqs.set_queue_attributes(
        QueueUrl=stage.dlq.url, Attributes={"MessageRetentionPeriod": "7200"}
    )
    refused = run(*slow[:-1])
    assert refused.exit_code == exit_codes.USAGE
    assert "(--force)" in refused.stderr


@pytest.mark.parametrize(
    ("report", "code"),
    [
        ({}, exit_codes.DONE),
        ({"poison": 1}, exit_codes.POISON),
        ({"poison": 1, "failed": 1}, exit_codes.FOUND),
        ({"not_deleted": 1}, exit_codes.FOUND),
        ({"failed": 1, "ended": Ended.GATE}, exit_codes.GATE),
        ({"ended": Ended.INTERRUPTED}, exit_codes.INTERRUPTED),
        ({"ended": Ended.UNREACHABLE}, exit_codes.UNREACHABLE),
    ],
)
def test_gravest_exit_code(report, code):
    """The gravest result determines the exit code."""
    assert exit_code(RedriveReport(**report), {}) == code


def test_exit_code_of_doubt():
    """Messages in doubt count as a failure, unless ``--include-unknown`` sends them again.

    A message is in doubt if the redrive does not know whether SQS has taken it.
    """
    report = RedriveReport(in_doubt=1)
    assert exit_code(report, {"include_unknown": True}) == exit_codes.DONE
    assert exit_code(report, {}) == exit_codes.FOUND


def test_help_fits_on_a_screen(run):
    """The help has at most 50 lines of 80 columns.

    It does not list the argument QUEUE among the options.
    """
    lines = run("sqs-redrive", "--help").stdout.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    assert not any(line.strip() in ("QUEUE", "[QUEUE]") for line in lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", [["sqs-peek"], ["sqs-redrive", "--yes", "--rate", "9/s"]])
def test_signal_with_silent_sqs(tmp_path, command, number):
    """A signal ends a command at once although SQS does not answer it.

    The command then says that it has received no message.
    """
    with socket.create_server(("127.0.0.1", 0)) as silent, (tmp_path / "err").open("w") as errors:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        options = {"region": "us-east-1", "is_secure": False}
        queues = {"mails": {"url": f"http://{host}/000000000000/mails"}}
        settings = {
            "broker_url": f"sqs://k:s@{host}//",
            "broker_transport_options": {**options, "predefined_queues": queues},
        }
        child = start(settings, tmp_path, *command, "mails-dlq", stdout=errors, stderr=errors)
        try:
            silent.settimeout(60)
            with silent.accept()[0]:
                time.sleep(0.5)  # wait until the command waits for the response
                child.send_signal(number)
                began = time.monotonic()
                assert child.wait(60) == exit_codes.INTERRUPTED
                assert time.monotonic() - began < 5
        finally:
            child.kill()
            child.wait()
    assert "interrupted: no message was received" in (tmp_path / "err").read_text()


# For scripts


def test_json_events(stage, run):
    """With ``--json``, the last event has the report."""
    stage.fill_numbered(3)
    result = run("sqs-redrive", stage.dlq.name, "--yes", "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert events[0]["event"] == "Started"
    assert events[-1]["event"] == "Finished"
    assert events[-1]["report"]["sent"] == 3
    assert events[-1]["report"]["ended"] == "done"


@pytest.fixture
def signalled(stage, proxy, tmp_path):
    """Return a function that runs ``sqs-redrive``, sends it signals, and returns its exit code.

    The redrive gets the signals while it sends messages.
    """

    def signalled(*signals):
        output = tmp_path / "out"
        with output.open("wb") as file:
            command = ("sqs-redrive", stage.dlq.name, "--yes", "--json", "--rate", "10/s")
            child = start(
                settings_of(stage), tmp_path, *command, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            eventually(
                lambda: '"MessagesSent"' in output.read_text() or child.poll() is not None,
                timeout=60,
            )
            proxy.set_latency(500)  # so that calls are under way when the signal comes
            for number in signals:
                child.send_signal(number)
                eventually(lambda: "Waiting for SQS" in output.read_text(), timeout=60)
            return child.wait(60)
        finally:
            child.kill()
            child.wait()

    return signalled


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_redrive(stage, signalled, number):
    """A signal ends a redrive. It gives the messages back that it has received and not sent."""
    bodies = stage.fill_numbered(100)
    assert signalled(number) == exit_codes.INTERRUPTED
    left, moved = stage.bodies(stage.dlq), stage.bodies(stage.queue)
    assert left + moved == Counter(bodies)
    assert 0 < sum(moved.values()) < 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_second_signal(stage, signalled, number, tmp_path):
    """After a second signal, a redrive ends at once. Its other messages stay hidden for a while."""
    stage.fill_numbered(100)
    assert signalled(number, number) == exit_codes.INTERRUPTED
    lines = (tmp_path / "out").read_text().splitlines()
    (last,) = [json.loads(line) for line in lines if '"Finished"' in line]
    assert last["ended"] == "interrupted"
    moved = sum(stage.bodies(stage.queue).values())
    found = stage.sqs.get_queue_attributes(QueueUrl=stage.dlq.url, AttributeNames=["All"])
    stem = "ApproximateNumberOfMessages"
    left = sum(int(found["Attributes"][stem + kind]) for kind in ("", "NotVisible"))
    report = last["report"]
    # A message is on both queues if SQS did not answer its send or its delete in time. The report
    # counts each of these messages.
    twice = left + moved - 100
    assert 0 <= twice <= report["in_doubt"] + report["not_deleted"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_question(stage, tmp_path, number):
    """A signal during the question ends the redrive, which still writes its last event.

    The redrive does not tell the user to give ``--yes``, since there is a user who could answer.
    """
    stage.fill_numbered(3)
    with (tmp_path / "out").open("wb") as output, (tmp_path / "err").open("wb") as errors:
        streams = {"stdin": subprocess.PIPE, "stdout": output, "stderr": errors}
        command = ("sqs-redrive", stage.dlq.name, "--json")
        child = start(settings_of(stage), tmp_path, *command, **streams)
    try:
        said = tmp_path / "err"
        eventually(lambda: "no undo" in said.read_text(), timeout=60)
        child.send_signal(number)
        assert child.wait(60) == exit_codes.INTERRUPTED
    finally:
        child.kill()
        child.wait()
    assert json.loads((tmp_path / "out").read_text())["ended"] == "interrupted"
    assert "--yes" not in said.read_text()
    assert sum(stage.bodies(stage.dlq).values()) == 3


# What an engineer on call needs


UNKNOWN = record(reason="not retryable", outcome="UNKNOWN")


def test_question_of_unknown(stage, run):
    """A redrive asks a separate question about messages whose work may have been done already.

    With ``--yes`` it asks nothing and leaves these messages, unless ``--include-unknown`` is given.
    """
    origin = {"origin": stage.queue.arn}
    stage.fill(task(), MessageAttributes=record(**origin))
    stage.fill(task(), task(), MessageAttributes=record(outcome="UNKNOWN", **origin))
    asked = run("sqs-redrive", stage.dlq.name, answer="n\nn\n")
    assert "2 of them may have been DONE ALREADY" in asked.stderr
    assert "Send 1 message," in asked.stderr
    unattended = run("sqs-redrive", stage.dlq.name, "--yes")
    assert "1 of 3 sent." in unattended.stdout
    assert "2 may have been done already and stay" in unattended.stdout
    assert "--include-unknown" in unattended.stdout
    assert "2 of 2 sent." in run("sqs-redrive", stage.dlq.name, "--yes", "--include-unknown").stdout


def test_show_one_message(stage, run):
    """``sqs-peek --id`` shows one message with its whole record, and escapes control characters."""
    traceback = "Traceback (most recent call last):\n  File x\nOSError: \x1b[2J refused"
    body = stage.fill(
        task("mails.send", id="the-id"), MessageAttributes=record(traceback=traceback)
    )
    stage.fill_numbered(3)
    result = run("sqs-peek", stage.dlq.name, "--id", "the-id")
    for text in ("task: mails.send", "outcome: RETRYABLE", "attempts: 7", "  OSError: \\x1b[2J"):
        assert text in result.stdout
    assert "\x1b" not in result.output
    assert body[0] not in result.stdout


@pytest.mark.parametrize("command", [["sqs-redrive", "--yes"], ["sqs-peek"]])
def test_refused_as_json(run, command):
    """With ``--json``, a command that is refused also prints a last event."""
    result = run(*command, "no-such-queue", "--json")
    event = json.loads(result.stdout.splitlines()[-1])
    assert (event["event"], event["ended"]) == ("Finished", "refused")
    assert "no queue" in event["detail"]


def test_without_terminal(stage, run):
    """Without a terminal, a redrive ends and tells the user to give ``--yes``.

    It ends after the first question, because nobody could answer the second one.
    """
    stage.fill_numbered(1)
    result = run("sqs-redrive", stage.dlq.name)
    assert result.exit_code == exit_codes.INTERRUPTED
    assert "--yes" in result.stderr
    stage.fill(task(), MessageAttributes=UNKNOWN)
    result = run("sqs-redrive", stage.dlq.name)
    assert result.stderr.count("[y/N]") == 1, "nobody could answer a second question"


def test_journal_by_default(stage, run, tmp_path):
    """By default a redrive keeps a journal that only its user can read, and shows its path."""
    stage.fill_numbered(3)
    result = run("sqs-redrive", stage.dlq.name, "--yes", "--rate", "100/s")
    (path,) = (tmp_path / "state" / "celery-sqs-backoff").iterdir()
    assert str(path) in result.stderr.replace("\n", "")
    assert path.stat().st_mode & 0o077 == 0
    stage.fill_numbered(1)
    run("sqs-redrive", stage.dlq.name, "--yes", "--journal", "none")
    assert len(list(path.parent.iterdir())) == 1


def test_warns_without_rate(stage, run):
    """A redrive without a rate prints a warning."""
    stage.fill_numbered(1)
    assert "Warning: no --rate" in run("sqs-redrive", stage.dlq.name, "--yes").stderr


def test_control_characters(stage, run):
    """Control characters of a message do not reach the terminal.

    The commands cut and escape reasons, origins, bodies and tasks.
    """
    evil = "\x1b]0;pwned\x07\u202e" + "A" * 50_000
    stage.fill(
        json.dumps({"body": "", "headers": {"task": evil, "id": evil}}),
        MessageAttributes=record(reason=evil, origin=evil, exception_message=evil),
    )
    for arguments in (["sqs-peek", "--messages"], ["sqs-redrive", "--yes"]):
        result = run(*arguments, stage.dlq.name)
        assert "\x1b" not in result.output
        assert "\u202e" not in result.output
        assert len(result.output) < 20_000


@pytest.mark.parametrize("named", ["its name", "its URL", "its ARN"])
def test_select_by_origin(stage, run, make_queue, named):
    """``--from`` selects the messages of one queue of a shared dead-letter queue."""
    other = make_queue(dead_letter_queue=False)
    policy = {"deadLetterTargetArn": stage.dlq.arn, "maxReceiveCount": "3"}
    stage.sqs.set_queue_attributes(
        QueueUrl=other.url, Attributes={"RedrivePolicy": json.dumps(policy)}
    )
    options = stage.app.conf.broker_transport_options
    options["predefined_queues"]["sms"] = {"url": other.url}
    stage.fill("mine", MessageAttributes=record(origin=stage.queue.arn))
    stage.fill("other's", MessageAttributes=record(origin=other.arn))
    names = {"its name": other.name, "its URL": other.url, "its ARN": other.arn}
    run("sqs-redrive", stage.dlq.name, "--yes", "--from", names[named])
    assert stage.bodies(other) == Counter(["other's"])
    assert not stage.bodies(stage.queue)


def test_no_question_about_nothing(stage, run):
    """A redrive does not ask when there is nothing to send."""
    none = run("sqs-redrive", stage.dlq.name)
    assert (none.exit_code, "There is no message." in none.stderr) == (exit_codes.DONE, True)
    assert run("sqs-peek", stage.dlq.name, "--id", "x").exit_code == exit_codes.FOUND
    stage.fill(*(task("mails.send") for _ in range(3)))
    unmatched = run("sqs-redrive", stage.dlq.name, "--task", "no.such", "--json")
    assert unmatched.exit_code == exit_codes.NOTHING_MATCHED
    assert json.loads(unmatched.stdout.splitlines()[-1])["ended"] == "done"

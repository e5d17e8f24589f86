"""What ``celery sqs-redrive`` and ``celery sqs-peek`` print, and where they keep the journal.

The journal tells the next run what a killed run has sent. A message is in doubt if it may or may
not have been sent.
"""

import io
import json
import os
import pwd
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff.commands import exit_codes, progress, redrive_shell
from celery_sqs_backoff.commands.environment import journal_directory
from celery_sqs_backoff.commands.show import closing, print_messages, print_plan
from celery_sqs_backoff.redrive import Ended, Plan, RedriveReport
from celery_sqs_backoff.redrive.events import Finished, InDoubt
from celery_sqs_backoff.redrive.look import MessageFacts

NAME = "задача.日本"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_escaped_name(encoding, monkeypatch):
    """If a terminal cannot show the name of a task, the commands print it with escapes.

    One such name must not keep the user from seeing the other messages.
    """
    fact = MessageFacts(
        "1", NAME, None, 0.0, None, None, NAME, None, 0, False, None, "send", ""
    )  # fmt: skip
    plan = Plan("dlq", 1, looked_at=1, matching=1, by_task=Counter({NAME: 1}), letters=[fact])
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    print_plan(plan, err=False)
    print_messages(plan, show_arguments=False)
    sys.stdout.flush()
    assert written.getvalue().count(NAME.encode("ascii", "backslashreplace")) == 3


def test_user_without_home(tmp_path, monkeypatch, capsys):
    """If the user has no home directory, a redrive has no journal and says so.

    An example is a container that runs with the user ID of ``nobody``.
    """

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert journal_directory() is None
    assert "no journal" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_read_only_journal(tmp_path, monkeypatch):
    """If there is a journal on a read-only disk, a redrive does not begin without it.

    Without the journal, it would send the messages again that a killed run has sent.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = journal_directory()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert journal_directory() is None
    (directory / "mail-dlq-01234567.journal").touch()
    assert journal_directory() == directory


def test_end_with_expired():
    """The last lines of a redrive say how many messages have expired and stay on the queue."""
    report = RedriveReport(skipped=6, unknown=4, looked_at=6)
    found = " ".join(closing(report, queue="q", options={}, journal=None))
    assert "2 have expired and stay" in found
    assert "--expired extend" in found
    selected = closing(report, queue="q", options={"task": "a"}, journal=None)
    assert "expired" not in " ".join(selected)  # they may have been left out by the filter


def test_end_of_delete():
    """With ``delete``, the last lines of a redrive say that it deleted messages without a send."""
    report = RedriveReport(dropped=20, deleted=20, failed=1, looked_at=21)
    found = closing(report, queue="q", options={"delete": True}, journal=None)
    assert found[0] == "20 of 21 deleted unsent."
    assert found[1].startswith("1 could not be deleted and stay")


def test_end_of_restore():
    """The last lines of a restore count the messages that it put back on their queue."""
    report = RedriveReport(sent=3, in_doubt=1, skipped=2, looked_at=11)
    found = closing(report, queue="q", options={"restore": "a"}, journal="a.restored")
    assert found[0] == "3 of 11 put back on q."
    assert found[1] == "5 had been put back by an earlier run, as a.restored says."
    assert found[2] == "2 were on the queue already and were not sent."
    assert "--include-unknown" in found[3]


@pytest.mark.parametrize("selected", [{}, {"task": "a"}])
def test_end_of_resumed_run(selected):
    """If a redrive only deleted what a killed one had sent, its last lines say so."""
    report = RedriveReport(deleted=40, looked_at=40)
    found = closing(report, queue="q", options=selected, journal="j")
    counted = "0 sent, 40 looked at." if selected else "0 of 40 sent."
    assert found == [counted, "40 had been sent by an earlier run and were only deleted."]
    assert redrive_shell.exit_code(report, selected) == exit_codes.DONE


@pytest.mark.parametrize(("resend", "said"), [(False, "sent already;"), (True, "sent twice;")])
def test_end_with_doubt(resend, said):
    """The last lines of a redrive count the messages in doubt. A line above has all their IDs."""
    report = RedriveReport(in_doubt=160, looked_at=160)
    found = closing(report, queue="q", options={"include_unknown": resend}, journal=None)
    assert found[1].startswith(f"160 may have been {said} their ids are above")
    ids = tuple(f"{n:08x}-0000-0000-0000-000000000000" for n in range(160))
    shown = progress._line(InDoubt(ids, resend=resend))
    assert all(id_ in shown for id_ in ids)


@pytest.mark.parametrize(
    ("report", "options", "command"),
    [
        ({"sent": 2}, {}, None),
        ({"sent": 1, "failed": 1}, {}, "sqs-peek q --messages"),
        ({"poison": 1}, {"force": True}, "sqs-peek q --force --messages"),
        ({"skipped": 1, "unknown": 1}, {}, "sqs-peek q --messages --outcome UNKNOWN"),
        ({"ended": Ended.INCOMPLETE}, {}, "sqs-redrive q ..."),
        ({"ended": Ended.GATE, "failed": 1}, {}, "sqs-redrive q ..., which continues from j"),
        ({"sent": 1, "not_deleted": 1}, {}, "sqs-redrive q ..., which continues from j"),
    ],
)
def test_end_names_next_command(report, options, command):
    """The last lines of a redrive name one command to type next, if there is still work."""
    found = closing(
        RedriveReport(looked_at=2, **report),
        queue="q",
        options=options,
        journal="j" if command and "continues" in command else None,
    )
    said = [line for line in found if line.startswith("Next: ")]
    assert said == ([f"Next: {command}"] if command else [])


@pytest.mark.parametrize(
    ("report", "options", "is_said"),
    [
        ({"remaining": 90}, {}, True),
        ({}, {}, False),
        ({"remaining": 9, "skipped": 9}, {"task": "a"}, False),
        ({"remaining": 9}, {"limit": 90}, False),
        ({"remaining": 90}, {"restore": "a"}, False),
    ],
)
def test_end_with_remaining(report, options, is_said):
    """If all messages were sent and some are on the queue again, the last lines count these.

    Their tasks may have failed again at once.
    """
    report = RedriveReport(sent=90, deleted=90, looked_at=90, **report)
    found = closing(report, queue="q", options=options, journal=None)
    assert ("90 are on the queue now: look with sqs-peek q --messages" in found) is is_said


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs ``celery -A shop sqs-redrive mail-dlq`` without an SQS."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: Celery(set_as_current=False))
    return lambda *options, command="sqs-redrive": CliRunner().invoke(
        celery, ["-A", "shop", command, "mail-dlq", *options]
    )


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_engine_error_after_send(run, monkeypatch, error):
    """If a bug ends a redrive after a send, the exit code is not that of a refused redrive.

    The code for a refused redrive tells the user that nothing was sent.
    """

    def redrive(app, queue, *, on_event, **options):
        on_event(Finished(RedriveReport(sent=7, ended=Ended.FAILED), "failed", "ValueError"))
        raise error("a bug")

    monkeypatch.setattr(redrive_shell, "redrive", redrive)
    result = run("--yes", "--json")
    assert result.exit_code == exit_codes.FOUND
    assert [(line["event"], line["ended"]) for line in lines(result)] == [("Finished", "failed")]
    assert "sent 7" in run("--yes").stdout


def test_restore_without_journal(run, monkeypatch):
    """The command refuses a restore without a journal, because a second one would send again."""
    monkeypatch.setattr(redrive_shell, "redrive", lambda *args, **options: RedriveReport(sent=7))
    result = run("--yes", "--restore", __file__, "--journal", "none")
    assert result.exit_code == exit_codes.USAGE
    assert "a second restore" in result.stderr


def test_closed_stdin(run, monkeypatch):
    """If stdin is closed, as under some supervisors, a redrive does not ask but needs ``--yes``."""

    plan = Plan("dlq", 1, looked_at=1, matching=1)
    monkeypatch.setattr(redrive_shell, "peek", lambda *args, **options: plan)
    monkeypatch.setattr(redrive_shell, "redrive", lambda *args, **options: RedriveReport(sent=7))
    closed = SimpleNamespace(**vars(sys) | {"stdin": None})
    monkeypatch.setattr(redrive_shell, "sys", closed)
    asked = run("--rate", "9/s", "--json")
    assert asked.exit_code == exit_codes.INTERRUPTED
    assert lines(asked)[-1]["ended"] == "declined"
    assert "Pass --yes" in asked.stderr
    assert run("--rate", "9/s", "--yes").exit_code == exit_codes.DONE


@pytest.mark.parametrize(
    ("options", "plan", "code", "ended"),
    [
        ([], Plan("dlq", 1, looked_at=1, matching=1), exit_codes.DONE, "done"),
        (["--task", "x"], Plan("dlq", 1, looked_at=1), exit_codes.NOTHING_MATCHED, "done"),
        (
            ["--rate", "1/h"],
            Plan("dlq", 9, looked_at=9, matching=9, ready=9, rate=0.1,
                 oldest_to_send_expires_in_seconds=1.0),
            exit_codes.USAGE,
            "refused",
        ),
    ],
    ids=["all", "none", "too late"],
)  # fmt: skip
def test_dry_run_as_json(run, monkeypatch, options, plan, code, ended):
    """``--dry-run --json`` prints the plan, and then the event ``Finished``."""
    monkeypatch.setattr(redrive_shell, "peek", lambda *args, **options: plan)
    result = run("--dry-run", "--json", *options)
    assert result.exit_code == code
    assert [line["event"] for line in lines(result)] == ["Plan", "Finished"]
    assert lines(result)[-1]["ended"] == ended


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan("dlq", 1, looked_at=1), "No message matched."),
        (Plan("dlq", 9, looked_at=1), "None of the 1 looked at match; there are 9."),
    ],
    ids=["all", "a sample"],
)
@pytest.mark.parametrize("command", ["sqs-peek", "sqs-redrive"])
def test_sample_without_match(run, monkeypatch, command, plan, said):
    """If no message matches, the commands say whether they have looked at all messages."""
    monkeypatch.setattr(redrive_shell, "peek", lambda *args, **options: plan)
    options = ["--dry-run"] if command == "sqs-redrive" else []
    code = exit_codes.NOTHING_MATCHED if options else exit_codes.FOUND
    result = run(*options, "--task", "x", command=command)
    assert result.exit_code == code
    assert said in result.stderr

"""What the commands print, and where they write, on machines that are not like ours."""

import io
import json
import os
import pwd
import subprocess
import sys
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff.commands import exit_codes, progress, redrive_shell
from celery_sqs_backoff.commands import peek as peek_command
from celery_sqs_backoff.commands.environment import as_typed, journal_directory
from celery_sqs_backoff.commands.show import closing, print_messages, print_plan
from celery_sqs_backoff.redrive import Ended, Plan, RedriveReport
from celery_sqs_backoff.redrive.events import Finished
from celery_sqs_backoff.redrive.look import MessageFacts

NAME = "задача.日本"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_name_that_the_terminal_cannot_show_is_escaped(encoding, monkeypatch):
    """A message whose task has such a name must not end a look at the others."""
    fact = MessageFacts(
        "1", NAME, None, None, 0.0, None, None, NAME, None, 0, False, None, "send", ""
    )  # fmt: skip
    plan = Plan("dlq", 1, looked_at=1, matching=1, by_task={NAME: 1}, letters=[fact])
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    print_plan(plan, err=False)
    print_messages(plan, show_arguments=False, show_bodies=False)
    sys.stdout.flush()
    assert written.getvalue().count(NAME.encode("ascii", "backslashreplace")) == 3


def test_a_user_without_a_home_has_no_journal_and_is_told(tmp_path, monkeypatch, capsys):
    """A container that runs with the id of nobody."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert journal_directory() is None
    assert "no journal" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_a_journal_on_a_disk_that_has_become_read_only_is_not_passed_over(tmp_path, monkeypatch):
    """It may say what a killed run has sent: a run without it sends that again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = journal_directory()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert journal_directory() is None
    (directory / "mail-dlq-01234567.journal").touch()
    assert journal_directory() == directory


def test_the_end_of_a_load_speaks_of_its_archive():
    report = RedriveReport(sent=1, failed=2, poison=1, looked_at=4, ended=Ended.GATE)
    found = " ".join(closing(report, queue=None, options={}, journal=None))
    assert "``" not in found
    assert "in the queue" not in found


def test_the_end_of_a_move_by_sqs_speaks_of_what_it_moved():
    """It said "100 of 0 sent. There was no message.": no message passes through our hands."""
    report, options = RedriveReport(sent=100, deleted=100), {"engine": "native"}
    assert closing(report, queue="q", options=options, journal=None) == ["100 moved by SQS."]


def test_the_end_says_that_messages_have_expired_and_stay():
    """Unattended, nothing else says why it was "0 of 6 sent"."""
    report = RedriveReport(skipped=6, unknown=4, looked_at=6)
    found = " ".join(closing(report, queue="q", options={}, journal=None))
    assert "2 have expired and stay" in found
    assert "--expired extend" in found
    selected = closing(report, queue="q", options={"task": "a"}, journal=None)
    assert "expired" not in " ".join(selected)  # or were not selected


def test_the_end_of_a_load_does_not_take_expired_messages_for_sent():
    report, options = RedriveReport(sent=2, skipped=3, looked_at=5), {"load": "a"}
    assert "expired" in closing(report, queue=None, options=options, journal="j")[-1]


def test_a_command_of_manage_py_can_be_pasted(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["./manage.py", "sqs_redrive", "q"])
    assert as_typed("sqs-redrive") == ("python ./manage.py ", "python ./manage.py sqs_redrive q")


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("sqs://AKIAX:secret@", "'sqs://***@'"),
        ("-bsqs://AKIAX:secret@localhost:4566", "'-bsqs://***@localhost:4566'"),
        ("--broker=sqs://AKIAX:secret@", "'--broker=sqs://***@'"),
        ("https://mail.example/health?token=secret", "'https://mail.example/health?token=***'"),
        ("https://sqs.us-east-1.amazonaws.com/1/q", "https://sqs.us-east-1.amazonaws.com/1/q"),
    ],
)
def test_a_command_to_be_pasted_masks_credentials_in_urls(monkeypatch, word, shown):
    monkeypatch.setattr(sys, "argv", ["celery", word, "sqs-redrive", "q"])
    before = f"celery {shown} "
    assert as_typed("sqs-redrive") == (before, f"{before}sqs-redrive q")


def test_a_command_to_be_pasted_selects_the_same_messages(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["celery", "sqs-redrive", "q", "--error", "*token: old*"])
    assert as_typed("sqs-redrive") == ("celery ", "celery sqs-redrive q --error '*token: old*'")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run ``celery -A ... sqs-redrive mail-dlq`` without any SQS."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: Celery(set_as_current=False))
    return lambda *options, command="sqs-redrive": CliRunner().invoke(
        celery, ["-A", "shop", command, "mail-dlq", *options]
    )


def lines(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_an_error_of_the_engine_after_a_send_is_no_refusal(run, monkeypatch, error):
    """Its exit code said that nothing was sent."""

    def redrive(app, queue, *, on_event, **options):
        on_event(Finished(RedriveReport(sent=7, ended=Ended.FAILED), "failed", "ValueError"))
        raise error("a bug")

    monkeypatch.setattr(redrive_shell, "redrive", redrive)
    result = run("--yes", "--json")
    assert result.exit_code == exit_codes.SOME_FAILED
    assert [(line["event"], line["ended"]) for line in lines(result)] == [("Finished", "failed")]
    assert "sent 7" in run("--yes").stdout


def test_a_stdin_that_is_closed_is_no_terminal(run, monkeypatch):
    """As some supervisors start a process: it ended with a traceback."""

    plan = Plan("dlq", 1, looked_at=1, matching=1)
    monkeypatch.setattr(redrive_shell, "peek", lambda *args, **options: plan)
    monkeypatch.setattr(redrive_shell, "redrive", lambda *args, **options: RedriveReport(sent=7))
    closed = SimpleNamespace(**vars(sys) | {"stdin": None})
    monkeypatch.setattr(progress, "sys", closed)
    monkeypatch.setattr(redrive_shell, "sys", closed)
    asked = run("--rate", "9/s", "--json")
    assert asked.exit_code == exit_codes.INTERRUPTED
    assert lines(asked)[-1]["ended"] == "declined"
    assert "give --yes" in asked.stderr
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
def test_a_dry_run_as_json_ends_with_a_last_event_too(run, monkeypatch, options, plan, code, ended):
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
def test_a_look_at_some_does_not_speak_of_all(run, monkeypatch, command, plan, said):
    monkeypatch.setattr(redrive_shell, "peek", lambda *args, **options: plan)
    monkeypatch.setattr(peek_command, "peek", lambda *args, **options: plan)
    options = ["--dry-run"] if command == "sqs-redrive" else []
    result = run(*options, "--task", "x", command=command)
    assert result.exit_code == exit_codes.NOTHING_MATCHED
    assert said in result.stderr


#: A shell and its job, as after Ctrl-Z and ``bg``. Its exit code: the signal that stopped the job.
JOB_CONTROL = """
import fcntl, os, select, signal, sys, termios, time
from types import SimpleNamespace
from celery_sqs_backoff.commands import progress
from celery_sqs_backoff.redrive.pace import Pace

signal.alarm(30)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
begun, begins = os.pipe()
if not (job := os.fork()):
    signal.alarm(30)
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    seen = []
    def noting(*args):
        found = select.select(*args)
        seen.extend(found[0])
        return found
    progress.select = SimpleNamespace(select=noting)
    with progress.rate_keys(Pace(10)):
        os.write(begins, b".")
        while len(seen) < 2:
            time.sleep(0.01)
    os._exit(0)
os.read(begun, 1)
os.tcsetpgrp(0, os.getpgrp())
print("in the background", flush=True)
status = os.waitpid(job, os.WUNTRACED)[1]
os.WIFSTOPPED(status) and os.kill(job, signal.SIGKILL)
sys.exit(status >> 8)
"""


def test_a_run_in_the_background_is_not_stopped_by_what_is_typed_nor_at_its_end():
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", JOB_CONTROL],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    ) as shell:
        os.close(slave)
        shown = b""
        while b"in the background" not in shown:
            shown += os.read(master, 1024)
        os.write(master, b"ls")
        assert shell.wait() == 0, shown
    os.close(master)

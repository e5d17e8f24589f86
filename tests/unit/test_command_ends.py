"""How our commands, such as ``celery sqs-redrive``, end: with an exit code and a line of error."""

import os
import re
import signal
import threading
from pathlib import Path

import click
import pytest
from celery import Celery, current_app
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff.commands import exit_codes
from celery_sqs_backoff.commands.environment import until_signalled
from celery_sqs_backoff.commands.exit_codes import INTERRUPTED, UNREACHABLE, USAGE

ASK_SQS = {
    "sqs-redrive": ["mails", "--yes"],
    "sqs-peek": ["mails"],
    "sqs-status": ["-Q", "mails"],
    "sqs-doctor": ["-Q", "mails"],
}
ALL = ASK_SQS | {"sqs-health": [], "sqs-safe": ["list", "order:7"], "sqs-simulate": []}
SECRET = "hunter2"


def app_on(broker, **options):
    app = Celery("shop", set_as_current=False, broker=broker)
    patience = {"retries": {"total_max_attempts": 1}, "connect_timeout": 1}
    app.conf.broker_transport_options = {
        "region": "us-east-1", "is_secure": False, "max_retries": 1, "client-config": patience,
        **options,
    }  # fmt: skip
    return app


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs a command. Without ``app``, it runs ``celery`` without ``-A``."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run(name, *arguments, app=None):
        monkeypatch.setattr("celery.bin.celery.find_app", lambda name: app)
        return CliRunner().invoke(celery, [*(["-A", "shop"] if app else []), name, *arguments])

    return run


def assert_ended(result, code, words):
    """Check that a command ended with a code and one line of error, which shows no password."""
    assert (result.exit_code, result.exception.__class__) == (code, SystemExit), result.output
    [line] = [line for line in result.stderr.splitlines() if line]
    assert line.startswith("Error: ")
    assert words in line
    assert SECRET not in result.output


@pytest.mark.parametrize("name", ALL)
def test_no_app(run, name, monkeypatch):
    """Without an app, every command ends with an error that names ``-A``.

    Without ``-A``, Celery uses a default app whose broker is RabbitMQ on the same machine.
    """
    monkeypatch.setattr("celery._state.default_app", None)
    monkeypatch.setattr("celery._state._tls", type("Local", (), {"current_app": None})())
    assert current_app.main == "default"
    assert_ended(run(name, *ALL[name]), USAGE, f"-A proj {name}")


@pytest.mark.parametrize("name", ASK_SQS)
def test_other_broker(run, name):
    """A command that needs SQS refuses another broker."""
    app = app_on(f"redis://:{SECRET}@127.0.0.1:1/0")
    assert_ended(run(name, *ASK_SQS[name], app=app), USAGE, "broker is redis, not SQS")


@pytest.mark.parametrize("name", ["sqs-status", "sqs-doctor"])
def test_unreachable(run, name):
    """A command that cannot reach SQS ends with an error about the network.

    ``sqs-redrive`` and ``sqs-peek`` try for 20 seconds first, so slower tests cover them.
    """
    app = app_on(f"sqs://key:{SECRET}@127.0.0.1:1//")
    assert_ended(run(name, *ASK_SQS[name], app=app), UNREACHABLE, "Check the network")


@pytest.mark.parametrize("name", ASK_SQS)
def test_no_credentials(run, name):
    """Without credentials, a command ends with an error that names ``AWS_PROFILE``."""
    assert_ended(run(name, *ASK_SQS[name], app=app_on("sqs://")), UNREACHABLE, "AWS_PROFILE")


def test_missing_queue(run):
    """``sqs-status`` ends with an error if a queue does not exist.

    ``sqs-doctor`` shows a missing queue among its findings instead.
    """
    app = app_on(
        f"sqs://key:{SECRET}@127.0.0.1:1//",
        predefined_queues={"sms": {"url": "http://127.0.0.1:1/1/sms"}},
    )
    assert_ended(run("sqs-status", "-Q", "mails", app=app), USAGE, "Check the queue's name")


@pytest.mark.parametrize("name", ALL)
def test_ctrl_c(run, name, monkeypatch):
    """Ctrl-C ends every command with its own exit code and one line."""

    def interrupt(*args, **options):
        try:
            raise OSError("a call that was under way")
        except OSError:
            raise KeyboardInterrupt  # noqa: B904

    for module in ("command", "peek", "redrive", "status", "doctor", "health", "safe", "simulate"):
        monkeypatch.setattr(f"celery_sqs_backoff.commands.{module}.app_of", interrupt)
    result = run(name, *ALL[name], app=app_on("sqs://"))
    assert_ended(result, INTERRUPTED, "interrupted")


@pytest.mark.parametrize("name", ALL)
def test_help_lists_exit_codes(run, name):
    """The help of each command lists its exit codes by number, with their meanings."""
    text = " ".join(run(name, "--help").output.split())
    [codes] = re.findall(r"Exit codes: (.*?)\.(?: Examples:|$)", text)
    told = {int(code): meaning for code, meaning in re.findall(r"(\d+) (.*?)(?:; |$)", codes)}
    assert list(told) == sorted(told)
    assert {0, 2, 130} <= told.keys() <= {1, *exit_codes.MEANINGS}
    assert all(told.values())
    command = celery.commands[name]
    assert isinstance(command, click.Command)
    assert set(told) == set(command.codes)


def test_meanings_are_unique():
    """An exit code has the same meaning in all commands."""
    numbers = {n: v for n, v in vars(exit_codes).items() if isinstance(v, int)}
    assert len(set(numbers.values())) == len(numbers)
    assert set(numbers.values()) - {exit_codes.FOUND} == exit_codes.MEANINGS.keys()


def test_commands_page():
    """``docs/commands.md`` lists all exit codes."""
    page = Path(__file__).parents[2] / "docs/commands.md"
    rows = re.findall(r"^\| ([\d, ]+) \|", page.read_text(), re.MULTILINE)
    listed = {int(code) for row in rows for code in row.split(",")}
    assert listed == {exit_codes.FOUND, *exit_codes.MEANINGS}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_ignored_signal(number):
    """If a command was started with a signal ignored, it goes on ignoring this signal.

    A redrive under ``nohup`` goes on when the terminal closes.
    """
    before = signal.signal(number, signal.SIG_IGN)
    try:
        stop = threading.Event()
        with until_signalled(stop):
            os.kill(os.getpid(), number)
            assert not stop.is_set()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)

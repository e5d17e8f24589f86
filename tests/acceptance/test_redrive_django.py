"""``manage.py sqs_redrive`` and ``sqs_peek`` do what the commands of ``celery`` do."""

import json
import subprocess
from collections.abc import Callable

import pytest

from celery_sqs_backoff.commands import exit_codes
from tests.integration.redrive_stage import RedriveStage, record, task
from tests.support.cases import cases
from tests.support.manage import run_manage

Manage = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def stage(sqs, sqs_endpoint, queue):
    return RedriveStage(sqs, sqs_endpoint, queue)


@pytest.fixture
def manage(stage, sqs_endpoint, tmp_path):
    """Return a function that runs ``manage.py`` of the example project on the stage's queue."""

    def run(*arguments):
        return run_manage(
            *arguments, endpoint=sqs_endpoint, queue=stage.queue, XDG_STATE_HOME=str(tmp_path)
        )

    return run


def test_replay(stage, manage):
    """``manage.py`` looks at a dead-letter queue and replays it."""
    bodies = stage.fill(task("mails.send"), task("mails.send"), MessageAttributes=record())
    peeked = manage("sqs_peek", stage.dlq.url, "--json")
    assert peeked.returncode == exit_codes.DONE, peeked.stderr
    assert json.loads(peeked.stdout)["by_reason"]
    replayed = manage("sqs_redrive", stage.dlq.url, "--to", stage.queue.url, "--yes")
    assert replayed.returncode == exit_codes.DONE, replayed.stderr
    assert sorted(stage.bodies(stage.queue).elements()) == sorted(bodies)


@cases(
    "arguments code",
    {
        "invalid rate": (["--rate", "many"], exit_codes.USAGE),
        "unknown option": (["--no-such-option"], exit_codes.USAGE),
        "help": (["--help"], exit_codes.DONE),
    },
)
def test_exit_codes(stage, manage, arguments, code):
    """The Django command's exit codes are those of the Celery command."""
    ended = manage("sqs_redrive", stage.dlq.url, "--yes", *arguments)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr


def test_django_options(stage, manage):
    """The Django commands take Django's own options."""
    stage.fill(task("mails.send"))
    own = ["--settings", "example_project.settings", "--traceback", "-v", "2", "--no-color"]
    for arguments in (own, ["--settings=example_project.settings", "--verbosity=0"]):
        peeked = manage("sqs_peek", stage.dlq.url, "--json", *arguments)
        assert peeked.returncode == exit_codes.DONE, peeked.stderr
        assert json.loads(peeked.stdout)["messages"] == 1


def test_help(manage):
    """``manage.py help`` shows the options."""
    shown = manage("help", "sqs_redrive")
    assert shown.returncode == 0, shown.stderr
    for option in ("--rate", "--probe", "--journal", "--outcome"):
        assert option in shown.stdout

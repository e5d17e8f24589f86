"""``celery sqs-simulate``: options, output and exit codes."""

import json

import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff import FullJitter, SQSBackoffTask
from celery_sqs_backoff.commands.exit_codes import DONE, USAGE


@pytest.fixture
def app():
    made = Celery("simulated", broker="sqs://", set_as_current=False)
    made.conf.sqs_backoff = {"retry_for": 7200.0}

    @made.task(
        name="mails.send",
        shared=False,
        base=SQSBackoffTask,
        backoff=FullJitter(cap=60),
        retry_for=600,
    )
    def send(): ...

    @made.task(name="mails.plain", shared=False)
    def plain(): ...

    yield made
    made.close()


@pytest.fixture
def run(app, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("celery.bin.celery.find_app", lambda name: app)
        return CliRunner().invoke(celery, ["-A", "shop", "sqs-simulate", *arguments])

    return run


def test_strategies_side_by_side(run):
    """The table has a column for the policy alone, and one for the policy with ``provider=``.

    The progress of the simulation goes to stderr.
    """
    result = run("--outage", "10m")
    assert result.exit_code == DONE
    heading, *rows = result.stdout.splitlines()
    assert heading.split() == ["full-jitter", "provider"]
    assert len(next(row for row in rows if "wasted" in row).split()) == 3 + 2
    assert "simulating provider" in result.stderr
    assert "simulating" not in result.stdout


def test_json(run):
    """With ``--json``, stdout has the JSON and nothing else."""
    result = run("--outage", "5m", "--messages", "2/s", "--json", "--seed", "3")
    shown = json.loads(result.stdout)["results"]
    assert [figures["strategy"] for figures in shown] == ["full-jitter", "provider"]
    assert 500 < shown[0]["messages"] < 700


def test_options(run):
    """The simulation uses the options of the app, or those of the task that is named.

    In an outage of 20 minutes, the task's ``retry_for`` of 10 minutes gives dead letters. The app's
    two hours give none.
    """
    arguments = ("--outage", "20m", "--json")
    app_wide, _ = json.loads(run(*arguments).stdout)["results"]
    own, _ = json.loads(run(*arguments, "--task", "mails.send").stdout)["results"]
    assert app_wide["dead"] == {}
    assert own["dead"]
    few, _ = json.loads(run(*arguments, "--max-receive-count", "3").stdout)["results"]
    assert set(few["dead"]) == {"the queue's maxReceiveCount is reached"}


def test_plot(run, tmp_path):
    """``--plot`` writes a picture in addition to the table."""
    picture = tmp_path / "short.svg"
    result = run("--outage", "2m", "--plot", str(picture))
    assert result.exit_code == DONE
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--call", "0"], "expected more than 0"),
        (["--outage", "soon"], "--outage"),
        (["--capacity", "0"], "invalid --capacity"),
        (["--outage", "1m", "--plot", "/no/such/place/x.svg"], "No such file"),
        (["--task", "mails.none"], "no task 'mails.none'"),
        (["--task", "mails.plain"], "not based on SQSBackoffTask"),
        (["--outage", "1m", "--plot", "x.text"], "not supported"),
    ],
    ids=" ".join,
)
def test_wrong_options(run, arguments, words):
    """Wrong options end with a usage error that names the fault."""
    result = run(*arguments)
    assert result.exit_code == USAGE
    assert words in result.stderr
    assert "Traceback" not in result.output

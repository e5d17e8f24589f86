"""What the commands print, and where they write, on machines that are not like ours."""

import io
import os
import pwd
import sys

import pytest

from celery_sqs_backoff.commands.environment import journal_directory
from celery_sqs_backoff.commands.show import closing, print_messages, print_plan
from celery_sqs_backoff.redrive import Ended, Plan, RedriveReport
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


def test_the_end_of_a_load_speaks_of_its_archive():
    report = RedriveReport(sent=1, failed=2, poison=1, looked_at=4, ended=Ended.GATE)
    found = " ".join(closing(report, queue=None, options={}, journal=None))
    assert "``" not in found
    assert "in the queue" not in found

"""What a command finds around it."""

import os
import signal

import pytest

from celery_sqs_backoff.commands.environment import journal_directory, until_signalled


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_so(number):
    """``nohup``, or a script's background job: the terminal may close, the redrive goes on."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with until_signalled() as stop:
            os.kill(os.getpid(), number)
            assert not stop.is_set()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_user_without_a_home_directory_has_no_journal_and_is_told(monkeypatch, capsys):
    """A container's user id that no passwd file knows: the command ended with a traceback."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert journal_directory() is None
    assert "Warning: no journal (~/.local/state" in capsys.readouterr().err

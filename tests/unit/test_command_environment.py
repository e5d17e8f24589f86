"""What a command finds around it."""

import os
import signal

import pytest

from celery_sqs_backoff.commands.environment import until_signalled


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

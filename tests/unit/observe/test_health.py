"""A worker is alive when its loops turn."""

from __future__ import annotations

import logging
import os
import time
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff.commands.exit_codes import DONE, FOUND
from celery_sqs_backoff.observe import health
from celery_sqs_backoff.observe.health import Heartbeat, Pulse, diagnosis
from celery_sqs_backoff.observe.http import serve
from tests.support.fake_sqs import Clock
from tests.support.processes import eventually


@pytest.fixture
def clock():
    return Clock(1_000.0)


@pytest.fixture
def pulse(clock):
    made = Pulse(clock)
    made.watch("poller of mails", limit_seconds=45)
    return made


def test_turning_loop(pulse, clock):
    """A loop that turns in time has no fault."""
    for _ in range(10):
        clock.now += 40
        assert pulse.faults() == []
        pulse.note_turn("poller of mails")


def test_hanging_loop(pulse, clock):
    """A loop that hangs is named as a fault until it turns again."""
    clock.now += 46
    assert pulse.faults() == ["poller of mails has completed no turn for 46 s"]
    pulse.note_turn("poller of mails")
    assert pulse.faults() == []


def test_dead_thread(pulse):
    """A dead thread is named as a fault at once."""
    pulse.watch("keeper", limit_seconds=45, is_alive=lambda: False)
    assert pulse.faults() == ["keeper has died"]
    pulse.forget("keeper")
    assert pulse.faults() == []


def test_unwatched_loop(pulse):
    """A turn of a loop that is not watched is ignored."""
    pulse.note_turn("something else")
    assert pulse.faults() == []


def set_age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_age_decides(pulse, tmp_path):
    """A worker is alive while its file is young; a clock that was set back is a fault."""
    path = tmp_path / "heartbeat"
    now = time.time()
    assert "cannot be read (FileNotFoundError)" in (diagnosis(path, now=now) or "")
    Heartbeat(path, pulse).beat()
    os.utime(path, (5_000, 5_000))
    assert diagnosis(path, now=5_010) is None
    assert diagnosis(path, now=5_021) == "the last heartbeat is 21 s old; expected at most 20 s"
    assert diagnosis(path, now=5_021, max_age_seconds=30) is None
    assert "3600 s in the future: check the clocks" in (diagnosis(path, now=1_400) or "")
    Heartbeat(path, pulse).beat()
    assert diagnosis(path, now=time.time()) is None


def test_untouched_while_a_loop_hangs(pulse, clock, tmp_path, caplog):
    """A loop that hangs ends the beats, and the log says once which loop it is."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "heartbeat"
    heartbeat = Heartbeat(path, pulse)
    heartbeat.beat()
    set_age(path, 60)
    clock.now += 60
    heartbeat.beat()
    heartbeat.beat()
    assert "60 s old" in (diagnosis(path, now=time.time()) or "")
    said = "sqs_backoff.unhealthy: poller of mails has completed no turn for 60 s"
    assert caplog.text.count(said) == 1
    pulse.note_turn("poller of mails")
    heartbeat.beat()
    assert diagnosis(path, now=time.time()) is None
    assert "sqs_backoff.healthy" in caplog.text


def test_time_to_notice():
    """A stopped worker is noticed within 30 seconds.

    The interval and the age add up to less than that.
    """
    assert health.INTERVAL_SECONDS + health.MAX_AGE_SECONDS < 30


def test_unwritable_file(pulse, tmp_path, caplog):
    """A heartbeat file that cannot be written is logged once, and tried again.

    The log says why the probe takes the worker for dead.
    """
    path = tmp_path / "absent" / "heartbeat"
    heartbeat = Heartbeat(path, pulse)
    heartbeat.beat()
    heartbeat.beat()
    said = f"sqs_backoff.unhealthy: the heartbeat {path} cannot be written: No such file"
    assert caplog.text.count(said) == 1
    path.parent.mkdir()
    heartbeat.beat()
    assert diagnosis(path, now=time.time()) is None
    assert list(path.parent.iterdir()) == [path], "nothing else is left"


def test_beats_until_stop(pulse, tmp_path, monkeypatch):
    """The heartbeat goes on until the worker stops, and then leaves no file."""
    monkeypatch.setattr(health, "INTERVAL_SECONDS", 0.01)
    path = tmp_path / "heartbeat"
    heartbeat = Heartbeat(path, pulse)
    heartbeat.start()
    set_age(path, 100)
    eventually(lambda: diagnosis(path, now=time.time()) is None)
    heartbeat.stop()
    assert not path.exists()


def test_command(pulse, tmp_path, monkeypatch):
    """``sqs-health`` tells by the heartbeat file whether the worker is healthy."""
    path = tmp_path / "heartbeat"
    app = Celery("probed", set_as_current=False)
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: app)

    def run(*arguments):
        result = CliRunner().invoke(celery, ["-A", "shop", "sqs-health", *arguments])
        return result.exit_code, result.output

    assert run()[0] == 2
    app.conf.sqs_backoff = {"heartbeat": str(path)}
    code, said = run()
    assert code == FOUND
    assert said.startswith("unhealthy: no heartbeat")
    Heartbeat(path, pulse).beat()
    assert run() == (DONE, "healthy\n")
    assert run("--file", str(tmp_path / "other"))[0] == FOUND


def test_probe_with_file(pulse, tmp_path, monkeypatch):
    """A probe with a file does not import the app.

    If the import takes longer than the probe's timeout, the probe would end healthy workers.
    """
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: pytest.fail("an import"))
    path = tmp_path / "heartbeat"
    Heartbeat(path, pulse).beat()
    result = CliRunner().invoke(celery, ["sqs-health", "--file", str(path)])
    assert (result.exit_code, result.output) == (DONE, "healthy\n")


@pytest.fixture
def url(pulse):
    server = serve("127.0.0.1", 0, metrics=lambda: (b"a 1\n", "text/plain"), faults=pulse.faults)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_http(url, clock):
    """The HTTP server has metrics and health, and a status 503 that names the fault."""
    assert urllib.request.urlopen(f"{url}/metrics", timeout=5).read() == b"a 1\n"
    assert urllib.request.urlopen(f"{url}/healthz", timeout=5).read() == b"ok"
    clock.now += 100
    with pytest.raises(HTTPError, match="503") as caught:
        urllib.request.urlopen(f"{url}/healthz", timeout=5)
    assert b"poller of mails has completed no turn for 100 s" in caught.value.read()
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/", timeout=5)


def test_serve_by_host_name(pulse):
    """The port is served on a host given by its name."""
    server = serve("localhost", 0, metrics=lambda: (b"a 1\n", "text/plain"), faults=pulse.faults)
    try:
        page = urllib.request.urlopen(f"http://localhost:{server.server_port}/metrics", timeout=5)
        assert page.read() == b"a 1\n"
    finally:
        server.shutdown()
        server.server_close()

"""A worker is alive when its loops turn."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner

from celery_sqs_backoff.commands import health as command
from celery_sqs_backoff.observe import health
from celery_sqs_backoff.observe.health import Heartbeat, Pulse, diagnosis
from celery_sqs_backoff.observe.http import serve
from tests.support.fake_sqs import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000.0)


@pytest.fixture
def pulse(clock: Clock) -> Pulse:
    made = Pulse(clock)
    made.watch("poller of mails", limit_seconds=45)
    return made


def test_a_loop_that_turns_is_well(pulse: Pulse, clock: Clock) -> None:
    for _ in range(10):
        clock.now += 40
        assert pulse.faults() == []
        pulse.turned("poller of mails")


def test_a_loop_that_hangs_is_named(pulse: Pulse, clock: Clock) -> None:
    clock.now += 46
    assert pulse.faults() == ["poller of mails has not turned for 46 s"]
    pulse.turned("poller of mails")
    assert pulse.faults() == []


def test_a_dead_thread_is_named_at_once(pulse: Pulse) -> None:
    pulse.watch("keeper", limit_seconds=45, is_alive=lambda: False)
    assert pulse.faults() == ["keeper has died"]
    pulse.forget("keeper")
    assert pulse.faults() == []


def test_what_is_not_watched_may_turn(pulse: Pulse) -> None:
    pulse.turned("something else")
    assert pulse.faults() == []


def test_a_fresh_file_without_faults_is_healthy(pulse: Pulse, clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    Heartbeat(path, pulse, now=lambda: 5_000).write()
    assert diagnosis(path, now=5_010) is None
    assert diagnosis(path, now=1_400) == (
        "the last heartbeat is 3600 s in the future: the clock was set back"
    )
    assert diagnosis(path, now=5_021) == "the last heartbeat is 21 s old; expected at most 20 s"
    clock.now += 60
    Heartbeat(path, pulse, now=lambda: 5_000).write()
    assert diagnosis(path, now=5_001) == "poller of mails has not turned for 60 s"
    assert [p.name for p in tmp_path.iterdir()] == ["heartbeat"], "nothing else is left"


def test_a_file_from_before_the_container_started_says_nothing_of_its_worker(
    pulse: Pulse, tmp_path: Path
) -> None:
    """An emptyDir outlives a container that crashes: the startup probe passed at once."""
    path = tmp_path / "heartbeat"
    Heartbeat(path, pulse, now=lambda: 5_000).write()
    assert diagnosis(path, now=5_003, up_seconds=4) is None
    assert diagnosis(path, now=5_003, up_seconds=2) == (
        "the last heartbeat is from before this container started"
    )


def test_a_container_that_has_just_started_may_look_at_the_worker_of_another(
    pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``docker compose run`` with the same volume: five looks of eight were false."""
    path = tmp_path / "heartbeat"
    Heartbeat(path, pulse, now=lambda: 5_000).write()
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert diagnosis(path, now=5_003, up_seconds=1) is None


@pytest.mark.skipif(not Path("/proc/uptime").exists(), reason="no Linux")
def test_the_first_process_tells_how_long_the_container_is_up() -> None:
    machine = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < (health.seconds_up() or 0) < machine + 5


def test_a_stopped_worker_is_noticed_within_30_seconds() -> None:
    assert health.INTERVAL_SECONDS + health.MAX_AGE_SECONDS < 30


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"at": "x", "faults": []}', '{"at": NaN, "faults": []}', '{"at": 1}'],
)
def test_a_file_that_holds_something_else_is_unhealthy(tmp_path: Path, text: str) -> None:
    path = tmp_path / "heartbeat"
    path.write_text(text)
    assert "holds something else" in (diagnosis(path, now=0) or "")
    assert "cannot be read (FileNotFoundError)" in (diagnosis(tmp_path / "no", now=0) or "")


def test_a_file_that_cannot_be_written_is_said_once_and_tried_again(
    pulse: Pulse, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nobody finds out from the worker's log why the probe takes it for dead."""
    path = tmp_path / "absent" / "heartbeat"
    heartbeat = Heartbeat(path, pulse)
    heartbeat.write()
    heartbeat.write()
    said = f"sqs_backoff.heartbeat_not_written: {path}: No such file or directory"
    assert caplog.text.count(said) == 1
    path.parent.mkdir()
    heartbeat.write()
    assert diagnosis(path, now=time.time()) is None
    path.unlink()
    path.mkdir()  # now it cannot be replaced
    heartbeat.write()
    assert caplog.text.count("heartbeat_not_written") == 2
    assert list(path.parent.iterdir()) == [path], "nothing else is left"


def test_a_worker_that_ends_leaves_no_file(pulse: Pulse, tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat", pulse)
    heartbeat.start()
    assert json.loads((tmp_path / "heartbeat").read_text())["faults"] == []
    heartbeat.stop()
    assert not (tmp_path / "heartbeat").exists()


def test_the_command(pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "heartbeat"
    app = Celery("probed", set_as_current=False)
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: app)

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(celery, ["-A", "shop", "sqs-health", *arguments])
        return result.exit_code, result.output

    assert run()[0] == 2
    app.conf.sqs_backoff = {"heartbeat": str(path)}
    code, said = run()
    assert code == command.UNHEALTHY
    assert said.startswith("unhealthy: no heartbeat")
    Heartbeat(path, pulse).write()
    assert run() == (command.HEALTHY, "healthy\n")
    assert run("--file", str(tmp_path / "other"))[0] == command.UNHEALTHY


def test_a_probe_with_a_file_imports_no_app(
    pulse: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that takes longer than the probe may would end healthy workers."""
    monkeypatch.setattr("celery.bin.celery.find_app", lambda name: pytest.fail("an import"))
    path = tmp_path / "heartbeat"
    Heartbeat(path, pulse).write()
    result = CliRunner().invoke(celery, ["sqs-health", "--file", str(path)])
    assert (result.exit_code, result.output) == (command.HEALTHY, "healthy\n")


@pytest.fixture
def url(pulse: Pulse) -> Iterator[str]:
    server = serve("127.0.0.1", 0, metrics=lambda: (b"a 1\n", "text/plain"), faults=pulse.faults)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_http_form(url: str, clock: Clock) -> None:
    assert urllib.request.urlopen(f"{url}/metrics", timeout=5).read() == b"a 1\n"
    assert urllib.request.urlopen(f"{url}/healthz", timeout=5).read() == b"ok"
    clock.now += 100
    with pytest.raises(HTTPError, match="503") as caught:
        urllib.request.urlopen(f"{url}/healthz", timeout=5)
    assert b"poller of mails has not turned for 100 s" in caught.value.read()
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/", timeout=5)


def write_as_another(path: Path, pid: int, *, at: float, where: str | None = None) -> None:
    """Write a heartbeat as another worker does, on this machine by default."""
    here = where or health._where()
    path.write_text(
        json.dumps({"id": f"worker {pid}", "pid": pid, "where": here, "at": at, "faults": []})
    )


def test_a_writer_in_another_container_is_forgotten_when_it_has_long_been_silent(
    pulse: Pulse, tmp_path: Path
) -> None:
    """Of one that was replaced. Its process number says nothing here, where it may be our own."""
    path, now = tmp_path / "heartbeat", [1_000.0]
    heartbeat = Heartbeat(path, pulse, now=lambda: now[0])
    heartbeat.write()
    for _ in range(3):  # both write for a while
        now[0] += 5
        write_as_another(path, os.getpid(), at=now[0], where="another container")
        heartbeat.write()
        assert "writes this file too" in str(diagnosis(path, now=now[0]))
    now[0] += 595
    heartbeat.write()
    assert "writes this file too" in str(diagnosis(path, now=now[0])), "it may just be stopped"
    now[0] += 10
    heartbeat.write()
    assert diagnosis(path, now=now[0]) is None


def test_two_workers_with_one_file_are_unhealthy_even_if_one_is_stopped(
    pulse: Pulse, tmp_path: Path
) -> None:
    path, now = tmp_path / "heartbeat", [1_000.0]
    heartbeat = Heartbeat(path, pulse, now=lambda: now[0])

    def other_writes() -> None:
        write_as_another(path, os.getppid(), at=now[0])

    other_writes()  # before this worker has begun: the one that it replaces
    heartbeat.write()
    assert diagnosis(path, now=now[0]) is None
    now[0] += 5
    other_writes()
    said = f"process {os.getppid()} writes this file too: each worker needs a file of its own"
    for _ in range(3):  # the other one is stopped meanwhile
        now[0] += 5
        heartbeat.write()
        assert diagnosis(path, now=now[0]) == said
    other_writes()
    heartbeat.stop()
    assert path.exists(), "it is the other one's"


def test_two_containers_with_one_file_are_unhealthy_though_both_are_process_1(
    tmp_path: Path,
) -> None:
    path, now = tmp_path / "heartbeat", [1_000.0]
    sick = Pulse()
    sick.check("poller", lambda: "the poller has died")
    well, other = (Heartbeat(path, pulse, now=lambda: now[0]) for pulse in (Pulse(), sick))
    for _ in range(3):
        now[0] += 5
        other.write()
        well.write()
    assert "writes this file too" in str(diagnosis(path, now=now[0]))
    other.stop()
    assert path.exists(), "the other one has written it"


def test_another_writer_that_has_ended_is_forgotten(pulse: Pulse, tmp_path: Path) -> None:
    path, now = tmp_path / "heartbeat", [1_000.0]
    heartbeat = Heartbeat(path, pulse, now=lambda: now[0])
    heartbeat.write()
    now[0] += 5
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True
    )
    write_as_another(path, int(ended.stdout), at=now[0])
    heartbeat.write()
    heartbeat.write()
    assert diagnosis(path, now=now[0]) is None


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_the_port_is_served_on_other_addresses_too(pulse: Pulse, host: str) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    server = serve(host, 0, metrics=lambda: (b"a 1\n", "text/plain"), faults=pulse.faults)
    try:
        name = f"[{host}]" if ":" in host else host
        page = urllib.request.urlopen(f"http://{name}:{server.server_port}/metrics", timeout=5)
        assert page.read() == b"a 1\n"
    finally:
        server.shutdown()
        server.server_close()


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
        return True

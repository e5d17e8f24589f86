"""What a newcomer runs first: the demo keeps its promises, and its mail provider can be trusted.

Nothing of the example project is imported: a Django project with a Celery app, it would make
itself the current one for all other tests.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from celery_sqs_backoff import Outcome, Verdict

from ..support.processes import eventually, stop

ROOT = Path(__file__).parents[2]
DEMO = ("-m", "example_project.demo")


class Family:
    """A program and all that it starts, recognised by a mark in their environment."""

    def __init__(self) -> None:
        self._mark = f"DEMO_TEST={uuid4().hex}"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        name, _, value = self._mark.partition("=")
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            # Without Python's own warnings, of Celery, that development mode shows.
            env={**os.environ, name: value, "PYTHONDEVMODE": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def alive(self) -> list[str]:
        """Command lines of the members that live. Empty where there is no /proc."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found.append((directory / "cmdline").read_text().replace("\0", " "))
            except OSError:  # ended meanwhile, or somebody else's
                continue
        return found


@pytest.fixture
def family() -> Family:
    return Family()


@pytest.mark.acceptance
def test_the_demo_sends_every_mail_once_and_leaves_nothing_running(
    family: Family, tmp_path: Path
) -> None:
    """``make demo`` in small: exit code 0, the figures, the picture, and no process left."""
    figures = tmp_path / "figures.json"
    demo = family.start(*DEMO, "--quick", "--mails=40", f"--output={tmp_path}", f"--json={figures}")
    try:
        output = demo.communicate(timeout=100)[0].decode()
    finally:
        stop(demo, timeout=20)

    assert demo.returncode == 0, output
    assert family.alive() == []
    summary = json.loads(figures.read_text())
    assert [run["policy"] for run in summary["runs"]] == ["autoretry", "full-jitter", "provider"]
    for run in summary["runs"]:
        assert run["mails"] == 40
        assert run["calls"] > 40, "no mail was retried: there was no outage"
        if run["policy"] == "autoretry":
            continue
        assert (run["lost"], run["duplicates"], run["dead"]) == (0, 0, 0)
        log = (tmp_path / f"worker-{run['policy']}.log").read_text()
        lines = [line for line in log.splitlines() if "provider_down" not in line]
        assert "WARNING" not in "".join(lines), "an example must not need a warning"
        assert "_failed" not in log
    assert summary["picture"] in output.replace("\n", "")
    assert Path(summary["picture"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("sent", "exit_code"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
    ],
)
def test_an_interrupted_demo_stops_all_it_has_started(
    sent: signal.Signals, exit_code: int, family: Family, tmp_path: Path
) -> None:
    demo = family.start(*DEMO, "--mails=100", f"--output={tmp_path}")
    worker_log = tmp_path / "worker-provider.log"
    try:
        eventually(
            lambda: worker_log.exists() and "worker-provider@" in worker_log.read_text(), timeout=90
        )
        demo.send_signal(sent)
        output, _ = demo.communicate(timeout=20)
    finally:
        stop(demo, timeout=20)
    assert demo.returncode == exit_code, output
    assert family.alive() == []


def in_the_project(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own that may import the example project."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_a_lost_mail_makes_the_demo_fail(tmp_path: Path) -> None:
    done = in_the_project(f"""
import sys
from example_project import demo
from example_project.scene import Result

def run(plan, console, logs):
    calls = [(0.5, 503), (2.0, 200)]
    common = dict(mails=2, duplicates=0, dead=0, recovered_at=1.0, calls=calls)
    return [Result("full-jitter", lost=1, **common), Result("provider", lost=0, **common)]

demo.run = run
sys.exit(demo.main(["--output", {str(tmp_path)!r}]))
""")
    assert done.returncode == 1, done.stderr
    assert "not as it should be" in done.stdout


def test_the_busiest_second_need_not_start_on_a_full_second() -> None:
    done = in_the_project("""
from example_project.scene import busiest_second
print(busiest_second([]), busiest_second([0.1, 0.9, 1.0, 1.2, 3.0]), busiest_second([1.0, 2.0]))
""")
    assert done.stdout.split() == ["0", "3", "1"], done.stderr


def test_a_mail_that_is_neither_sent_nor_in_the_dlq_is_lost_whatever_else_is_in_both() -> None:
    """Of four mails 1 and 2 were sent, 2 is in the DLQ as well, 3 is there alone: 4 is lost."""
    done = in_the_project("""
from types import SimpleNamespace
from example_project.scene import Plan, Scene

sqs = SimpleNamespace(
    create_queue=lambda name: SimpleNamespace(url="q"), broker_url="", dead_mails=lambda q: {2, 3}
)
provider = SimpleNamespace(
    url="",
    behave=lambda behaviour: None,
    report=lambda: {"first_call_at": 10.0, "duplicates": 5},
    calls=lambda: [(10.0, 503), (12.5, 200)],
    sent=lambda: {1, 2},
)
scene = Scene("full-jitter", Plan(mails=4), sqs, provider, "db")
scene._recovered_at = 12.0
result = scene.result()
print(result.lost, result.dead, result.duplicates, result.seconds_to_last_mail, result.is_clean)
""")
    assert done.stdout.split() == ["1", "2", "5", "0.5", "False"], done.stderr


def test_an_output_that_cannot_be_written_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, *DEMO, f"--output={tmp_path / 'file' / 'x'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "The demo failed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_an_sqs_port_that_somebody_has_is_refused_by_its_number(tmp_path: Path) -> None:
    """Its queues are not ours to use."""
    done = in_the_project(f"""
import socket
from pathlib import Path
from example_project.processes import DemoError, Programs
from example_project.services import SQS

with socket.create_server(("127.0.0.1", 0)) as other, Programs(Path({str(tmp_path)!r})) as programs:
    port = other.getsockname()[1]
    try:
        SQS(programs, Path({str(tmp_path)!r}), port=port)
    except DemoError as exc:
        print(str(port) in str(exc), programs._running)
""")
    assert done.stdout == "True []\n", done.stderr


def test_the_settings_of_django_reach_the_tasks() -> None:
    """``CELERY_SQS_BACKOFF`` is all there is to it."""
    done = in_the_project("""
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
import django
django.setup()
from example_project import celery_app
from example_project.mails.tasks import send_mail
print(sorted(celery_app.conf.sqs_backoff), send_mail.backoff_options.retry_for)
print(send_mail.backoff_options.backoff is django.conf.settings.CELERY_SQS_BACKOFF["backoff"])
""")
    assert done.stdout.splitlines() == [
        "['backoff', 'retry_for', 'store'] 3600.0",
        "True",
    ], done.stderr


def test_no_migration_of_the_example_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "example_project.manage", "makemigrations", "--check"],
        cwd=ROOT,
        env={
            **os.environ,
            "DATABASE": str(tmp_path / "db"),
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The mail provider, over HTTP, and what the example makes of its errors


class ProviderAtWork:
    """The provider's two addresses, seen by a caller who waits half a second for an answer."""

    def __init__(self, url: str, control_url: str) -> None:
        self.url, self.control_url = url, control_url

    def behave(self, **behaviour: Any) -> None:
        _open(self.control_url, behaviour)

    def report(self) -> dict[str, Any]:
        return _open(self.control_url)  # type: ignore[no-any-return]

    def send(self, mail_id: int) -> None:
        _open(f"{self.url}/mails", {"id": mail_id}, timeout=0.5)


def _open(url: str, content: dict[str, Any] | None = None, *, timeout: float = 5) -> Any:
    data = None if content is None else json.dumps(content).encode()
    with urlopen(Request(url, data=data), timeout=timeout) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def _provider() -> Iterator[ProviderAtWork]:
    process = subprocess.Popen(
        [sys.executable, "-m", "example_project.provider"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield ProviderAtWork(**json.loads(process.stdout.readline()))
    finally:
        stop(process)
        process.stdout.close()


@pytest.fixture
def provider(_provider: ProviderAtWork, monkeypatch: pytest.MonkeyPatch) -> ProviderAtWork:
    """A provider that is up. Its counts go on from test to test."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    _provider.behave(mode="up")
    return _provider


@pytest.fixture
def new_id() -> Callable[[], int]:
    """Mail ids that no test has used."""
    return lambda: uuid4().int


@pytest.fixture(scope="module")
def provider_errors() -> Callable[[BaseException], Outcome | Verdict | None]:
    """The example's classification of errors, taken from its file alone."""
    module = runpy.run_path(str(ROOT / "example_project" / "mails" / "errors.py"))
    return module["provider_errors"]  # type: ignore[no-any-return]


Errors = Callable[[BaseException], Outcome | Verdict | None]


def test_a_mail_sent_twice_is_counted_as_a_duplicate(
    provider: ProviderAtWork, new_id: Callable[[], int]
) -> None:
    before, mail_id = provider.report(), new_id()
    provider.send(mail_id)
    provider.send(mail_id)
    after = provider.report()
    assert after["mails"] - before["mails"] == 1
    assert after["duplicates"] - before["duplicates"] == 1
    assert after["calls"] - before["calls"] == 2


def test_down_means_503_and_a_retry(
    provider: ProviderAtWork, new_id: Callable[[], int], provider_errors: Errors
) -> None:
    provider.behave(mode="down")
    before = provider.report()
    with pytest.raises(HTTPError) as failure:
        provider.send(new_id())
    after = provider.report()
    assert failure.value.code == 503
    assert (after["calls"] - before["calls"], after["mails"] - before["mails"]) == (1, 0)
    assert provider_errors(failure.value) == Verdict(Outcome.RETRYABLE)


def test_refusing_means_that_nobody_listens_until_it_is_up_again(
    provider: ProviderAtWork, new_id: Callable[[], int], provider_errors: Errors
) -> None:
    provider.behave(mode="refusing")
    with pytest.raises(URLError) as failure:
        provider.send(new_id())
    assert isinstance(failure.value.reason, ConnectionRefusedError)
    assert provider_errors(failure.value) is Outcome.RETRYABLE

    provider.behave(mode="up")
    provider.send(new_id())


def test_beyond_the_rate_limit_a_call_is_answered_429_with_retry_after(
    provider: ProviderAtWork, new_id: Callable[[], int], provider_errors: Errors
) -> None:
    provider.behave(mode="up", calls_per_second=2, retry_after_seconds=7)
    provider.send(new_id())
    provider.send(new_id())
    before = provider.report()
    with pytest.raises(HTTPError) as failure:
        provider.send(new_id())
    assert failure.value.code == 429
    assert provider.report()["mails"] == before["mails"]
    assert provider_errors(failure.value) == Verdict(Outcome.RETRYABLE, retry_after=7)


def test_the_rate_limit_looks_back_one_second(
    provider: ProviderAtWork, new_id: Callable[[], int]
) -> None:
    provider.behave(mode="up", calls_per_second=1)
    provider.send(new_id())
    sent_at = time.monotonic()

    def is_let_in() -> bool:
        try:
            provider.send(new_id())
        except HTTPError:
            return False
        return True

    eventually(is_let_in, timeout=5)
    assert time.monotonic() - sent_at > 0.9


def test_slow_means_that_the_mail_is_sent_and_the_answer_comes_late(
    provider: ProviderAtWork, new_id: Callable[[], int]
) -> None:
    provider.behave(mode="slow", slowness_seconds=0.2)
    before, started = provider.report(), time.monotonic()
    provider.send(new_id())
    assert time.monotonic() - started >= 0.2
    assert provider.report()["mails"] == before["mails"] + 1


def test_silent_means_that_the_mail_is_sent_but_nobody_can_know(
    provider: ProviderAtWork, new_id: Callable[[], int], provider_errors: Errors
) -> None:
    """The one failure that must never be retried: the mail would go out twice."""
    provider.behave(mode="silent")
    before = provider.report()
    with pytest.raises(TimeoutError) as failure:
        provider.send(new_id())
    assert provider.report()["mails"] == before["mails"] + 1
    assert provider_errors(failure.value) is Outcome.UNKNOWN


def test_behaviour_that_does_not_exist_is_refused(provider: ProviderAtWork) -> None:
    with pytest.raises(HTTPError) as failure:
        provider.behave(mode="moody")
    assert failure.value.code == 400
    assert provider.report()["mode"] == "up"


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        pytest.param(400, Outcome.NOT_PROCESSED, id="malformed: no retry will help"),
        pytest.param(401, Outcome.NOT_PROCESSED, id="bad credentials: no retry will help"),
        pytest.param(502, Outcome.UNKNOWN, id="a gateway does not know what happened behind it"),
    ],
)
def test_other_answers_are_not_retried(
    status: int, verdict: Outcome, provider_errors: Errors
) -> None:
    assert provider_errors(HTTPError("http://x", status, "", {}, None)) is verdict  # type: ignore[arg-type]


def test_an_error_that_is_not_the_providers_is_left_to_others(provider_errors: Errors) -> None:
    assert provider_errors(KeyError("customer")) is None

"""``make demo`` and its fake mail provider work as the docs say.

The tests do not import the example project, because its Celery app would become the current app
for all other tests.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

from celery_sqs_backoff import Outcome, Verdict
from tests.support.cases import cases
from tests.support.processes import eventually, stop

ROOT = Path(__file__).parents[2]
DEMO = ("-m", "example_project.demo")


class Family:
    """A program and all processes that it starts. A variable in their environment marks them."""

    def __init__(self) -> None:
        self._mark = f"DEMO_TEST={uuid4().hex}"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        name, _, value = self._mark.partition("=")
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            # In development mode, Python would print warnings about Celery's own code.
            env={**os.environ, name: value, "PYTHONDEVMODE": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def alive(self) -> list[str]:
        """Return the command lines of the processes that still run; none if there is no /proc."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found.append((directory / "cmdline").read_text().replace("\0", " "))
            except OSError:  # the process has ended, or belongs to another user
                continue
        return found


@pytest.fixture
def family():
    return Family()


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    "mails",
    [pytest.param(40, id="40"), pytest.param(2000, id="2000", marks=pytest.mark.long)],
)
def test_demo(family, tmp_path, mails):
    """With this package, ``make demo`` sends each mail once, and a redrive sends the dead letters.

    The demo leaves no process behind.
    """
    figures = tmp_path / "figures.json"
    arguments = [f"--mails={mails}", f"--output={tmp_path}", f"--json={figures}"]
    demo = family.start(*DEMO, *(["--quick"] if mails == 40 else []), *arguments)
    try:
        output = demo.communicate(timeout=300)[0].decode()
    finally:
        stop(demo, timeout=20)

    assert demo.returncode == 0, output
    assert family.alive() == []
    summary = json.loads(figures.read_text())
    assert [run["policy"] for run in summary["runs"]] == ["autoretry", "full-jitter", "provider"]
    for run in summary["runs"]:
        assert run["mails"] == mails
        assert run["calls"] > mails, "no mail was retried: there was no outage"
        if run["policy"] == "autoretry":
            continue
        assert (run["lost"], run["duplicates"], run["dead"]) == (0, 0, 0)
        log = (tmp_path / f"worker-{run['policy']}.log").read_text()
        expected = ("provider_paused", "dead_letter")
        lines = [line for line in log.splitlines() if not any(name in line for name in expected)]
        assert "WARNING" not in "".join(lines), "the example logs an unexpected warning"
        assert "_failed" not in log
    replay = {"dead": 20, "left": 0, "sent": 20, "duplicates": 0}
    assert summary["replay"] == replay
    assert "celery -A example_project sqs-redrive mails --rate 10/s --yes" in output
    assert summary["picture"] in output.replace("\n", "")
    assert Path(summary["picture"]).read_bytes().startswith(b"\x89PNG")


def test_interrupted(tmp_path):
    """SIGINT and SIGTERM end the demo and all its processes, with an exit code of their own."""
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143}
    families = {sent: Family() for sent in codes}
    logs = {sent: tmp_path / sent.name for sent in codes}
    demos = {
        sent: family.start(*DEMO, "--mails=100", f"--output={logs[sent]}")
        for sent, family in families.items()
    }
    try:
        for sent, demo in demos.items():
            log = logs[sent] / "worker-provider.log"
            eventually(
                lambda log=log: log.exists() and "worker-provider@" in log.read_text(), timeout=90
            )
            demo.send_signal(sent)
        for sent, demo in demos.items():
            output, _ = demo.communicate(timeout=20)
            assert demo.returncode == codes[sent], output
            assert families[sent].alive() == []
    finally:
        for demo in demos.values():
            stop(demo, timeout=20)


def in_the_project(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process, which may import the example project."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_lost_mail(tmp_path):
    """The demo ends with exit code 1 if a mail was lost."""
    done = in_the_project(f"""
import sys
from example_project import demo
from example_project.scene import Replay, Result

def run(plan, console, picture, logs):
    calls = [(0.5, 503), (2.0, 200)]
    common = dict(mails=2, duplicates=0, dead=0, recovered_at=1.0, calls=calls)
    results = [Result("full-jitter", lost=1, **common), Result("provider", lost=0, **common)]
    return results, Replay(dead=1, left=0, sent=1, duplicates=0)

demo.run = run
sys.exit(demo.main(["--output", {str(tmp_path)!r}]))
""")
    assert done.returncode == 1, done.stderr
    assert "The logs are in" in done.stdout


def test_django_settings():
    """The tasks of the example get their options from Django's setting ``CELERY_SQS_BACKOFF``."""
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


def test_migrations(tmp_path):
    """The example project has all migrations that its models need."""
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


# The fake mail provider, and how the example classifies its errors


class MailProvider:
    """A client of the fake mail provider that waits at most half a second for a response.

    One address takes mails. The other sets how the provider behaves.
    """

    def __init__(self, url: str, control_url: str) -> None:
        self.url, self.control_url = url, control_url

    def behave(self, **behaviour: Any) -> None:
        _open(self.control_url, behaviour)

    def mails(self) -> int:
        return int(_open(self.control_url)["mails"])

    def send(self) -> None:
        _open(f"{self.url}/mails", {"id": uuid4().int}, timeout=0.5)


def _open(url: str, content: dict[str, Any] | None = None, *, timeout: float = 5) -> Any:
    data = None if content is None else json.dumps(content).encode()
    with urlopen(Request(url, data=data), timeout=timeout) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def provider():
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            [sys.executable, "-m", "example_project.provider"], cwd=ROOT, stdout=subprocess.PIPE
        ) as process,
    ):
        patch.setenv("NO_PROXY", "127.0.0.1")
        assert process.stdout is not None
        try:
            yield MailProvider(**json.loads(process.stdout.readline()))
        finally:
            stop(process)


@pytest.fixture(scope="module")
def verdict_on():
    """Return the example's classifier, which is loaded without an import of the project."""
    module = runpy.run_path(str(ROOT / "example_project" / "mails" / "errors.py"))
    return module["provider_errors"]


#: By the provider's mode: how many mails it sends, which error the caller gets, and how the example
#: classifies that error.
MODES: dict[str, tuple[int, type[Exception] | None, Outcome | Verdict | None]] = {
    "up": (1, None, None),
    "slow": (1, None, None),
    "down": (0, HTTPError, Verdict(Outcome.RETRYABLE)),
    "unauthorized": (0, HTTPError, Outcome.NOT_PROCESSED),
    "refusing": (0, URLError, Outcome.RETRYABLE),
    "silent": (1, TimeoutError, Outcome.UNKNOWN),  # a retry would send the mail twice
}


@pytest.mark.parametrize("mode", MODES)
def test_provider(provider, mode, verdict_on):
    """The example classifies an error as retryable only if the provider has not sent the mail."""
    sent, error, verdict = MODES[mode]
    provider.behave(mode=mode, slowness_seconds=0.2)
    before, began = provider.mails(), time.monotonic()
    with pytest.raises(error) if error else nullcontext() as failure:
        provider.send()
    assert provider.mails() == before + sent
    assert failure is None or verdict_on(failure.value) == verdict
    assert mode != "slow" or time.monotonic() - began >= 0.2


def test_rate_limit(provider, verdict_on):
    """Above its rate, the provider answers 429 with Retry-After. It takes a call a second later."""
    provider.behave(mode="up", calls_per_second=1, retry_after_seconds=7)
    provider.send()
    sent_at = time.monotonic()
    with pytest.raises(HTTPError) as failure:
        provider.send()
    assert failure.value.code == 429
    assert verdict_on(failure.value) == Verdict(Outcome.RETRYABLE, retry_after=7)

    def is_let_in():
        with suppress(HTTPError):
            provider.send()
            return True
        return False

    eventually(is_let_in, timeout=5)
    assert time.monotonic() - sent_at > 0.9


@cases(
    "status verdict",
    {
        "malformed request": (400, Outcome.NOT_PROCESSED),
        "bad credentials": (401, Outcome.NOT_PROCESSED),
        "gateway that does not know what the server did": (502, Outcome.UNKNOWN),
    },
)
def test_not_retried(status, verdict, verdict_on):
    """The example does not retry after these statuses of the provider.

    Its classifier says nothing about errors that are no errors of HTTP.
    """
    assert verdict_on(HTTPError("http://x", status, "", {}, None)) is verdict
    assert verdict_on(KeyError("customer")) is None

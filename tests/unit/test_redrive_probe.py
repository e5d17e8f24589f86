"""A redrive may have a probe that tells whether the provider works.

While the probe fails, the redrive's gate is closed: the redrive does not begin, or stops.
"""

import threading

import pytest

from celery_sqs_backoff.redrive import probe as probe_module
from celery_sqs_backoff.redrive.halt import Halt
from celery_sqs_backoff.redrive.probe import ProbeGate, parse_probe
from tests.support.http_faults import answer, http_faults


class Bench:
    def __init__(self, probe=None):
        self.halt = Halt()
        self.gate = ProbeGate(probe, self.halt)


def failing():
    raise RuntimeError("down")


def test_without_probe():
    """Without a probe the gate is open."""
    assert Bench().gate.why_closed() is None


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (lambda: True, None),
        (lambda: None, None),
        (lambda: False, "the probe returned False"),
        (failing, "the probe failed: RuntimeError"),
    ],
)
def test_probe_result(probe, why):
    """A probe that returns False or raises closes the gate."""
    assert Bench(probe).gate.why_closed() == why


def test_third_failure_in_a_row():
    """A redrive stops when its probe has failed three times in a row."""
    bench = Bench(failing)
    bench.gate.watch(0.0)
    bench.gate.watch(1.0)  # too soon for another call of the probe
    bench.gate.watch(5.0)
    assert not bench.halt.is_set
    bench.gate.watch(10.0)
    assert bench.halt.detail == "the probe failed: RuntimeError (3 times in a row)"


def test_success_resets_count():
    """A success between failures of the probe starts the count again."""
    answers = iter([False, False, True, False, False])
    bench = Bench(lambda: next(answers))
    for now in range(0, 25, 5):
        bench.gate.watch(float(now))
    assert not bench.halt.is_set


@pytest.mark.parametrize(("status", "closed"), [(204, False), (503, True), (302, True)])
def test_status_of_url(status, closed):
    """The probe of a URL succeeds only with a 2xx status.

    A redirect is a failure, because it may lead to a login page that answers 200.
    """
    answers = {"/login": answer(200)}
    with http_faults() as server:
        server.behave = lambda handler: answers.get(
            handler.path, answer(status, Location="/login")
        )(handler)
        probe = parse_probe(f"{server.url}/health")
        assert (Bench(probe).gate.why_closed() is not None) is closed


def test_probe_hangs(monkeypatch):
    """A probe that does not answer in time closes the gate, and does not hold up the redrive."""
    monkeypatch.setattr(probe_module, "_PROBE_TIMEOUT_SECONDS", 0.01)
    let_go = threading.Event()
    try:
        assert Bench(let_go.wait).gate.why_closed() == "the probe has not answered within 0.01 s"
    finally:
        let_go.set()


def test_no_thread_for_probe(monkeypatch):
    """If no thread can be started for the probe, the gate is closed.

    In the redrive's own thread, a probe that never answers would hold up the redrive for ever.
    """
    monkeypatch.setattr(probe_module, "call_in_time", lambda call, seconds: None)
    why = "the probe was not called: the machine allows no further thread"
    assert Bench(lambda: True).gate.why_closed() == why


def test_callable_by_name():
    """A probe may be a Python function, given as ``module:function``."""
    assert parse_probe("tests.unit.test_redrive_probe:failing").__name__ == "failing"


@pytest.mark.parametrize("text", ["nonsense", "no.such.module:x", "os:nothing", "os:name", "os:"])
def test_invalid_probe(text):
    """A probe that is neither a URL nor the name of a callable is refused."""
    with pytest.raises(ValueError, match="invalid probe"):
        parse_probe(text)


def test_module_raises(tmp_path, monkeypatch):
    """A probe whose module raises when it is imported is refused."""
    (tmp_path / "probe_without_settings.py").write_text("raise RuntimeError('not configured')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported"):
        parse_probe("probe_without_settings:check")

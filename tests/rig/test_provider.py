"""What a provider's gate keeps back, although it had been let pass."""

from datetime import datetime, timezone

import pytest
from celery.worker import state

from celery_sqs_backoff import Outcome, Provider, Retryable

from .bodies import returns


def _at(time):
    return datetime.fromtimestamp(time, timezone.utc).isoformat()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_prefetched_when_provider_fails(rig, pool):
    """A task that waits for a process is hidden if its provider is down when there is one."""
    ran = []

    def body(self):
        ran.append(self.request.id)
        raise Retryable("down")

    rig.task(body, provider=Provider("mail"))
    rig.start_worker(processes=10, pool=pool)
    messages = [rig.send() for _ in range(40)]
    rig.pass_time(1)
    under_way = [run.begin() for run in list(rig.worker.runs)[:10]]
    for run in under_way:
        run.finish()
        for waiting in list(rig.worker.runs):
            if len([each for each in rig.worker.runs if each.has_begun]) < 10:
                waiting.begin()
    while rig.worker.runs:
        rig.worker.runs[0].finish()
    rig.pass_time(1)
    assert len(rig.told("ProviderPaused")) == 1
    assert len(ran) <= 10 + 6, "what had begun by the sixth failure"
    assert {message.fate for message in messages} == {"hidden"}
    with rig.worker.acts():
        assert not state.requests, "Celery keeps none of them"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_gate_fails(rig, pool, monkeypatch):
    """The worker survives a gate that fails when the task begins, and hides the message.

    The error ended a prefork worker. A thread pool dropped the run, and held the message.
    """
    rig.task(returns, provider=Provider("mail"))
    worker = rig.start_worker(pool=pool)
    monkeypatch.setattr("celery_sqs_backoff.worker.providers.Gate.keeps_back", lambda *_: 1 / 0)
    messages = [rig.send() for _ in range(2)]
    rig.pass_time(1)
    for run in list(worker.runs):
        run.begin()
    rig.pass_time(1)
    assert {message.fate for message in messages} == {"hidden"}
    assert not worker.requests


def test_lost_before_it_begins(rig):
    """Celery keeps no request, with its body, of a message that runs elsewhere."""
    rig.queue(VisibilityTimeout="30")
    rig.task(returns)
    worker = rig.start_worker()
    messages = [rig.send() for _ in range(4)]
    rig.pass_time(1)
    first = rig.begin()
    rig.start_worker(processes=4)
    worker.freeze(45)
    while rig.worker.runs:
        rig.worker.runs[0].finish()
    first.finish()
    rig.pass_time(1)
    assert {message.fate for message in messages} == {"deleted"}
    assert not worker.requests


def test_hidden_after_eta(rig):
    """A message that waited in Celery for its ETA is hidden for its provider's rate."""
    rig.task(returns, provider=Provider("mail", rate="1/m"))
    worker = rig.start_worker(processes=4)
    messages = [rig.send() for _ in range(8)]
    for message in messages:  # SQS itself would delay a countdown
        message.forge(eta=_at(rig.timeline.now + 2))
    rig.pass_time(5)
    for run in list(worker.runs):
        run.finish()
    rig.pass_time(1)
    assert [message.fate for message in messages].count("hidden") >= 6
    assert len(worker.requests) <= 1


@pytest.mark.parametrize(
    ("classify", "pauses"),
    [(lambda exc: Outcome.UNKNOWN, True), (None, False)],
    ids=["", "unknown"],
)
def test_in_doubt(rig, classify, pauses):
    """An outage that leaves each call in doubt, as a 502, costs six messages, and not all.

    An error that no rule knows says nothing of the provider.
    """

    def body(self):
        raise LookupError

    rig.task(body, provider="gateway", **({"classify": classify} if classify else {}))
    messages = [rig.send() for _ in range(20)]
    for _ in range(7):  # the last one had begun
        rig.run()
    assert bool(rig.told("ProviderPaused")) == pauses
    assert bool(rig.worker.runs) != pauses
    assert sum(message.fate == "dead letter" for message in messages) == 7


def test_polling(rig):
    """A retry without an error is no failure of the provider."""

    def body(self):
        self.retry(countdown=1, max_retries=None)

    rig.task(body, provider="report")
    for _ in range(4):
        rig.send()
    for _ in range(20):
        rig.run()
    assert not rig.told("ProviderPaused")


def test_recovery(rig):
    """After an outage the hidden messages run one after another, and soon all of them."""
    up_at, calls = rig.timeline.now + 120, []

    def body(self):
        calls.append(rig.timeline.now)
        if rig.timeline.now < up_at:
            raise Retryable("down")

    def take(run):
        run.worker.after(0.1, lambda: run in run.worker.runs and run.finish())

    rig.on_run = take
    rig.task(body, provider=Provider("mail"))
    rig.start_worker(processes=4)
    messages = [rig.send() for _ in range(60)]
    rig.pass_time(120)
    assert len(calls) <= 25
    rig.pass_time(60)
    assert {message.fate for message in messages} == {"deleted"}
    assert len(calls) <= 25 + 60
    assert rig.told("ProviderPaused")
    assert rig.told("ProviderRecovering")

"""A provider's gate decides when messages run, and also stops messages that it had let pass."""

from datetime import datetime, timezone

import pytest
from celery.worker import state

from celery_sqs_backoff import Outcome, Provider, Retryable

from .bodies import returns


def _at(time):
    return datetime.fromtimestamp(time, timezone.utc).isoformat()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_prefetched_when_provider_fails(rig, pool):
    """A worker hides a waiting message if its provider is down by the time a process is free."""
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
    assert len(ran) <= 10 + 6, "more tasks ran than had begun by the sixth failure"
    assert {message.fate for message in messages} == {"hidden"}
    with rig.worker.acts():
        assert not state.requests, "Celery still keeps requests"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_gate_fails(rig, pool, monkeypatch):
    """If the gate raises an error when a task begins, the worker survives and hides the message.

    Otherwise the error would end a prefork worker. A threads pool would drop the run, and the
    worker would hold the message.
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
    """If another worker has taken over a message, Celery keeps no request of it, and so no body."""
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
    """A worker keeps to a provider's rate also for messages that waited in Celery for their ETA."""
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
    ids=["a rule knows it", "no rule knows it"],
)
def test_in_doubt(rig, classify, pauses):
    """The worker pauses a provider after six calls in doubt, for example with the status 502.

    An error that no rule knows does not count, because it may say nothing of the provider.
    """

    def body(self):
        raise LookupError

    rig.task(body, provider="gateway", **({"classify": classify} if classify else {}))
    messages = [rig.send() for _ in range(20)]
    for _ in range(7):  # the seventh had begun before the pause
        rig.run()
    assert bool(rig.told("ProviderPaused")) == pauses
    assert bool(rig.worker.runs) != pauses
    assert sum(message.fate == "dead letter" for message in messages) == 7


def test_polling(rig):
    """If a task calls ``self.retry`` without an error, this is no failure of its provider."""

    def body(self):
        self.retry(countdown=1, max_retries=None)

    rig.task(body, provider="report")
    for _ in range(4):
        rig.send()
    for _ in range(20):
        rig.run()
    assert not rig.told("ProviderPaused")


def test_recovery(rig):
    """During an outage a worker makes few calls. A minute after it, all messages have run."""
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

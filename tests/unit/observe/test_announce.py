"""Signals are sent for events, and a receiver that blocks holds up nobody."""

import threading

import pytest

from celery_sqs_backoff.observe.announce import Announce
from celery_sqs_backoff.observe.events import (
    HeldTooLong,
    LeaseLost,
    ProviderPaused,
    ProviderProbed,
    ProviderRecovered,
    ProviderRecovering,
)
from celery_sqs_backoff.signals import lease_lost, provider_changed
from tests.support.processes import eventually


@pytest.fixture
def sent():
    found = []

    def on_lost(sender, task_id, message_id, queue, **_):
        found.append((sender, task_id, message_id, queue))

    def on_changed(sender, state, tenant, **_):
        found.append((sender, state, tenant))

    lease_lost.connect(on_lost)
    provider_changed.connect(on_changed)
    yield found
    lease_lost.disconnect(on_lost)
    provider_changed.disconnect(on_changed)


def test_lease_lost(sent):
    """A lost lease is sent with its task as the sender."""
    Announce({"t": "the task"}.get)(LeaseLost(queue="q", task="t", task_id="i", message_id="m"))
    eventually(lambda: sent == [("the task", "i", "m", "q")])


def test_provider_changed(sent):
    """Each change of a provider's state is sent once, however often a recovery is told."""
    announce = Announce(lambda name: None)
    recovering = ProviderRecovering(provider="p", rate=1.0, waiting=7)
    for event in (
        ProviderProbed(provider="p"),
        HeldTooLong(queue="q", message_id="m"),
        ProviderPaused(provider="p", tenant="x"),
        *[ProviderPaused(provider="p"), recovering, recovering],
        ProviderRecovered(provider="p", recalled=7),
    ):
        announce(event)
    states = [("p", "paused", "x"), ("p", "paused", ""), ("p", "recovering", ""), ("p", "ok", "")]
    eventually(lambda: sent == states, message=lambda: str(sent))


def test_slow_receiver():
    """A slow receiver gets each signal in order, from one thread.

    A receiver that switches something off while a provider is down must not hear of the end first.
    """
    may_go, heard = threading.Event(), []

    def listen(sender, state, tenant, **_):
        if sender != "slow":
            return  # another test's, on its way
        may_go.wait(20)
        heard.append((tenant, state))

    before = threading.active_count()
    announce = Announce(lambda name: None)
    provider_changed.connect(listen)
    try:
        for tenant in map(str, range(50)):
            announce(ProviderPaused(provider="slow", tenant=tenant))
            announce(ProviderRecovered(provider="slow", tenant=tenant, recalled=0))
        assert threading.active_count() <= before + 1
        may_go.set()
        eventually(lambda: len(heard) == 100)
    finally:
        may_go.set()
        provider_changed.disconnect(listen)
    assert heard == [(str(n), state) for n in range(50) for state in ("paused", "ok")]


def test_receiver_ends_its_thread(sent):
    """A receiver that ends its thread does not end the signals."""

    def leave(**_):
        raise SystemExit

    announce = Announce(lambda name: None)
    provider_changed.connect(leave)
    try:
        announce(ProviderPaused(provider="p"))
        announce(ProviderRecovering(provider="p", rate=1.0, waiting=0))
        announce(LeaseLost(queue="q", task="t", task_id="i", message_id="m"))
        eventually(lambda: (None, "i", "m", "q") in sent)
        eventually(lambda: ("p", "recovering", "") in sent)
    finally:
        provider_changed.disconnect(leave)

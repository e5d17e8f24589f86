"""One stream of events, and what breaks in a listener stays there."""

import logging

from celery_sqs_backoff.observe.events import Events, HeldTooLong, Polled


def test_each_listener_gets_each_event_until_it_unsubscribes():
    events, first, second = Events(), [], []
    stop = events.subscribe(first.append)
    events.subscribe(second.append)
    one = Polled(queue="mails")
    events.emit(one)
    stop()
    two = HeldTooLong(queue="mails", message_id="m")
    events.emit(two)
    assert (first, second) == ([one], [one, two])


def test_a_listener_that_raises_is_logged_once_and_harms_nobody(caplog):
    events, seen = Events(), []

    def broken(event):
        raise OSError("disk full")

    events.subscribe(broken)
    events.subscribe(seen.append)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            events.emit(HeldTooLong(queue="mails", message_id="m"))
    assert len(seen) == 3
    [record] = caplog.records
    assert record.getMessage().startswith(
        "sqs_backoff.listener_failed: held_too_long: builtins.OSError"
    )
    assert "disk full" not in caplog.text

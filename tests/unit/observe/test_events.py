"""One stream of events, and what breaks in a listener stays there."""

import logging

from celery_sqs_backoff.observe.events import Events, HeldTooLong, Polled


def test_subscribe():
    """Each listener gets each event that comes after it."""
    first, second = [], []
    events = Events(first.append)
    one, two = Polled(queue="mails"), HeldTooLong(queue="mails", message_id="m")
    events.emit(one)
    events.subscribe(second.append)
    events.emit(two)
    assert (first, second) == ([one, two], [two])


def test_listener_raises(caplog):
    """A listener that raises is logged once, and the other listeners get all events.

    The log leaves out the text of the error.
    """
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

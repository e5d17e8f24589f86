"""A queue whose settlements SQS does not confirm brings no more messages, and the log says so."""

from celery_sqs_backoff.worker.backlog import Backlog

URL = "https://sqs.example/1/q"


def test_a_queue_that_is_behind_for_long_is_named_once(caplog):
    waiting, now = {URL: 1_001}, [0.0]
    backlog = Backlog(waiting.__getitem__, lambda: now[0])
    assert backlog.is_behind(URL)
    now[0] = 9.0
    assert backlog.is_behind(URL)
    assert caplog.text == ""
    for now[0] in (10.0, 11.0):
        assert backlog.is_behind(URL)
    assert caplog.text.count("sqs_backoff.settling_behind: queue q: 1001 messages") == 1
    waiting[URL] = 1_000
    assert not backlog.is_behind(URL)


def test_it_is_said_again_when_it_happens_again(caplog):
    waiting, now = {URL: 1_001}, [0.0]
    backlog = Backlog(waiting.__getitem__, lambda: now[0])
    for start in (0.0, 100.0):
        waiting[URL] = 1_001
        for now[0] in (start, start + 10):
            backlog.is_behind(URL)
        waiting[URL] = 0
        backlog.is_behind(URL)
    assert caplog.text.count("sqs_backoff.settling_behind") == 2

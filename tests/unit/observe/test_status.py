"""What SQS and the workers say of a queue, put together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_sqs_backoff.observe.board import ProviderNow, QueueNow, WorkerNow
from celery_sqs_backoff.observe.status import (
    QueueStatus,
    Status,
    read_status,
    render,
    sum_providers,
    with_workers,
)
from celery_sqs_backoff.sqs.calls import Calls
from tests.support.cases import cases
from tests.support.fake_sqs import Clock, FakeSQS

NOW = 10_000.0


def of(in_flight: int, *queues: QueueNow) -> QueueStatus:
    status = QueueStatus(name="mails", sqs_name="mails", in_flight=in_flight)
    return with_workers(status, [WorkerNow(queues={"mails": q}) for q in queues], now=NOW)


def test_sums_of_workers():
    """The numbers of a queue are the sums over its workers."""
    one = QueueNow(running=2, held=6, waiting=40, oldest_sent_at=NOW - 70)
    found = of(51, one, QueueNow(running=1, oldest_sent_at=NOW - 900))
    assert (found.running, found.waiting, found.oldest_seconds) == (3, 40, 900)
    assert found.unaccounted == 0


def test_waiting_after_deploy():
    """After a deploy, the number of waiting messages is unknown.

    The workers that have hidden them are gone, and zero would say that no message waits.
    """
    found = of(2_488, QueueNow(running=2, held=6, oldest_sent_at=NOW - 3))
    assert (found.waiting, found.oldest_seconds) == (None, None)
    assert (found.running, found.unaccounted) == (2, 2_480)


@cases(
    "in_flight known",
    {
        "few, on their way": (20, QueueNow()),
        "fewer than are known": (100, QueueNow(held=60)),
        "SQS has counted fewer": (5, QueueNow(held=60)),
    },
)
def test_small_differences(in_flight, known):
    """Small differences between the counts of SQS and of the workers are ignored."""
    found = of(in_flight, known)
    assert (found.waiting, found.unaccounted) == (0, 0)


def test_rows_and_notes():
    """The table has a row for each queue, and a line below for each thing to know."""
    mails = QueueStatus(
        name="mails-of-the-shop",
        ready=12,
        delayed=0,
        dead_letters=31,
        in_flight=24_809,
        at=NOW,
        known=QueueNow(
            running=8,
            waiting=24_801,
            oldest_sent_at=NOW - 11_520,
            next_gives_up_at=NOW + 2_880,
            dead_letters={"revoked": 1, "not retryable": 30},
        ),
    )
    bulk = QueueStatus(
        name="bulk", ready=0, delayed=0, in_flight=0, has_dlq=False, known=QueueNow()
    )
    heading, *rows, first, given_up = render(Status(queues=[mails, bulk], workers=1)).splitlines()
    assert heading.split("  ")[0] == "queue"
    cells = [" ".join(row.split()) for row in rows]
    assert cells[0] == "mails-of-the-shop 12 24801 8 24809 20.7% 0 31 3.2 hours"
    assert cells[1] == "bulk 0 0 0 0 0.0% 0 - -"
    assert len(heading) == len(rows[0]) == len(rows[1])
    assert first.endswith("the first waiting message gives up in 48 minutes")
    assert given_up.endswith("since they started: 30 not retryable, 1 revoked")


def test_providers():
    """A second table has the providers that are not ok, of all workers and with most messages."""
    of_workers = [
        WorkerNow(
            providers=(
                ProviderNow(provider="mailgun", state="paused", hidden=2_480),
                ProviderNow(provider="sms", state="ok"),
                ProviderNow(provider="push", state="ok", in_line=3),
            )
        ),
        WorkerNow(
            providers=(
                ProviderNow(provider="mailgun", state="recovering", rate=2.0, in_line=20),
                ProviderNow(provider="sms", tenant="5f", state="recovering", rate=2.5, in_line=7),
            )
        ),
    ]
    status = Status(queues=[], providers=sum_providers(of_workers), workers=2)
    _, _, *table = render(status).splitlines()
    assert [line.split("  ")[0] for line in table] == ["provider", "mailgun", "sms[5f]"]
    assert [line.split()[1:] for line in table[1:]] == [
        ["paused", "-", "2480", "20"],
        ["recovering", "2.5", "0", "7"],
    ]


def test_many_providers():
    """With a key, an outage of one provider pauses each tenant."""
    paused = [
        ProviderNow(provider="shop", tenant=str(n), state="paused", hidden=n) for n in range(100)
    ]
    status = Status(queues=[], providers=paused, workers=1)
    _, _, _, *rows, more = render(status).splitlines()
    assert [row.split()[0] for row in rows] == [f"shop[{n}]" for n in range(99, 94, -1)]
    assert more == "95 more providers are not ok: 4465 messages wait for them"


def said(*queues: QueueStatus, workers: int | None) -> str:
    why = "" if workers is not None else "no store"
    return render(Status(queues=queues, workers=workers, why=why))


def test_unknown_is_explained():
    """The status explains why a number is unknown."""
    known = QueueStatus(name="mails", ready=0, delayed=0, in_flight=3, known=QueueNow(running=3))
    other = QueueStatus(name="bulk", ready=0, delayed=0, in_flight=3)
    assert "? means not known: no worker of bulk has reported" in said(known, other, workers=1)
    assert "? means not known: no worker has reported" in said(other, workers=0)
    assert "? means not known: no store" in said(other, workers=None)
    assert "not known" not in said(known, workers=1)


@pytest.mark.parametrize("messages", [0, 1])
def test_queue_without_workers(messages):
    """The status says so if messages are ready and no worker has written, as after a crash."""
    sqs = FakeSQS(Clock(1e9))
    url = sqs.create_queue(QueueName="mails")["QueueUrl"]
    for _ in range(messages):
        sqs.send_message(QueueUrl=url, MessageBody="{}")
    status = read_status("mails", url, lambda url: Calls(sqs, url))
    assert ("no worker has reported" in said(status, workers=0)) == bool(messages)


def test_empty_queue():
    """The status of an empty queue has no unknown numbers."""
    empty = QueueStatus(
        name="mails", ready=0, delayed=0, in_flight=0, dead_letters=0, known=QueueNow()
    )
    text = said(empty, workers=0)
    assert "?" not in text
    assert text.splitlines()[1].endswith("-")
    assert "?" not in said(replace(empty, dead_letters=None, has_dlq=False), workers=0)
    denied = replace(empty, dead_letters=None)
    assert "mails: dead-letter queue cannot be read" in said(denied, workers=0)

"""What SQS and the workers say of a queue, put together."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from celery_sqs_backoff.commands.status import _screen, _Seen, _shown
from celery_sqs_backoff.observe.board import QueueNow, WorkerNow
from celery_sqs_backoff.observe.status import ProviderStatus, QueueStatus, with_workers

NOW = 10_000.0


def of(in_flight: int, *queues: QueueNow) -> QueueStatus:
    status = QueueStatus(
        name="mails", sqs_name="mails", in_flight=in_flight, retention_seconds=86_400
    )
    return with_workers(status, [WorkerNow(queues={"mails": q}) for q in queues], now=NOW)


def test_the_workers_sums_are_the_queues() -> None:
    one = QueueNow(running=2, held=6, waiting=40, oldest_sent_at=NOW - 70)
    found = of(51, one, QueueNow(running=1, oldest_sent_at=NOW - 900))
    assert (found.running, found.waiting, found.oldest_seconds) == (3, 40, 900)
    assert (found.unaccounted, found.deleted_in_seconds) == (0, 85_500)


def test_after_a_deploy_nobody_knows_how_many_wait() -> None:
    """The workers that have hidden them are gone; zero would say that nothing waits."""
    found = of(2_488, QueueNow(running=2, held=6, oldest_sent_at=NOW - 3))
    assert (found.waiting, found.oldest_seconds, found.deleted_in_seconds) == (None, None, None)
    assert (found.running, found.unaccounted) == (2, 2_480)


@pytest.mark.parametrize(
    ("in_flight", "known"),
    [
        pytest.param(20, QueueNow(), id="few, on their way"),
        pytest.param(100, QueueNow(held=60), id="fewer than are known"),
        pytest.param(5, QueueNow(held=60), id="SQS has counted fewer"),
    ],
)
def test_counts_that_differ_a_little_are_believed(in_flight: int, known: QueueNow) -> None:
    found = of(in_flight, known)
    assert (found.waiting, found.unaccounted) == (0, 0)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 160])
def test_no_terminal_is_too_narrow_for_a_name_or_a_number(width: int) -> None:
    """At 40 columns the queues had no names, and numbers were cut."""
    status = QueueStatus(
        name="mails-of-the-shop",
        ready=12,
        waiting=24_801,
        running=8,
        delayed=0,
        dead_letters=31,
        oldest_seconds=11_520.0,
        in_flight=24_809,
        in_flight_share=0.2067,
        unaccounted=77,
    )
    console = Console(width=width, file=StringIO())
    console.print(_shown(_Seen([status], [], NOW, 1), width))
    assert isinstance(console.file, StringIO)
    shown = "".join(console.file.getvalue().split())
    for text in ("mails-of-the", "24801", "24809", "20.7%", "31", "3.2hours", "77messagesinflight"):
        assert text in shown


def test_a_screen_of_many_queues_shows_what_there_is_to_say_first() -> None:
    """``--watch`` cuts what does not fit below."""
    queues = [QueueStatus(name=f"queue-{number}", failure="Denied") for number in range(60)]
    down = ProviderStatus(name="mailgun", state="open", waiting=7, workers=1)
    console = Console(width=100, file=StringIO())
    console.print(_screen(_Seen(queues, [down], NOW, 1), console))
    assert isinstance(console.file, StringIO)
    seen_at, provider, unread, header, *_ = console.file.getvalue().splitlines()
    assert re.match(r"seen at \d\d:\d\d:\d\d \S+;", seen_at), "the next look may take a while"
    assert provider.startswith("provider mailgun is down")
    assert unread == "queue-0, queue-1, queue-2, queue-3, queue-4 and 55 more: Denied"
    assert header.split()[0] == "queue"


def screen_of(*queues: QueueStatus) -> list[str]:
    """The lines that a terminal of 24 shows."""
    console = Console(width=100, height=24, file=StringIO())
    console.print(_screen(_Seen(list(queues), [], NOW, 1), console))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()[:24]


def test_a_screen_that_is_too_small_says_so_and_shows_the_queues_with_messages() -> None:
    empty = QueueStatus(name="", ready=0, delayed=0, in_flight=0, dead_letters=0, workers=1)
    queues = [replace(empty, name=f"queue-{number}") for number in range(60)]
    queues[40] = replace(queues[40], dead_letters=7)
    seen_at, _, first, *_ = screen_of(*queues)
    assert seen_at.endswith("; more than fits: name queues with -Q")
    assert first.startswith("queue-40 ")
    assert "more than fits" not in screen_of(*queues[:22])[0]


def test_what_there_is_to_say_of_each_queue_leaves_room_for_the_numbers() -> None:
    full = QueueStatus(name="", ready=5, delayed=0, in_flight=0, given_up={"expired": 1}, workers=1)
    lines = screen_of(*(replace(full, name=f"queue-{number}") for number in range(60)))
    assert "more than fits" in lines[0]
    assert [line.split()[0] for line in lines[13:15]] == ["queue", "queue-0"]


def test_many_providers_that_are_down_leave_room_for_the_numbers() -> None:
    """With a key, an outage of one provider shuts the gate of each tenant."""
    down = [
        ProviderStatus(name=f"shop[{n}]", state="open", waiting=n, workers=1) for n in range(100)
    ]
    console = Console(width=100, file=StringIO())
    console.print(_screen(_Seen([QueueStatus(name="mails")], down, NOW, 1), console))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    worst, rest = lines[1], lines[6]
    assert worst == "provider shop[99] is down (open): 99 messages wait for it"
    assert rest == "95 more providers are down: 4465 messages wait for them"


def said(*queues: QueueStatus, workers: int | None) -> str:
    console = Console(width=160, file=StringIO(), force_terminal=False)
    seen = _Seen(list(queues), [], NOW, workers, why="" if workers is not None else "no store")
    console.print(_shown(seen, console.width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_what_is_not_known_is_explained() -> None:
    known = QueueStatus(name="mails", ready=0, delayed=0, in_flight=3, workers=1)
    other = QueueStatus(name="bulk", ready=0, delayed=0, in_flight=3)
    assert "? is not known: no worker of bulk has written" in said(known, other, workers=1)
    assert "? is not known: no worker has written" in said(other, workers=0)
    assert "? is not known: no store" in said(other, workers=None)
    assert "is not known" not in said(known, workers=1)


def test_of_an_empty_queue_nothing_is_unknown() -> None:
    empty = QueueStatus(
        name="mails", ready=0, waiting=0, running=0, delayed=0, in_flight=0, dead_letters=0
    )
    text = said(replace(empty, in_flight_share=0.0), workers=0)
    assert "?" not in text
    assert text.splitlines()[1].endswith("-")
    assert "?" not in said(
        replace(empty, in_flight_share=0.0, dead_letters=None, has_dlq=False), workers=0
    )
    denied = replace(empty, in_flight_share=0.0, dead_letters=None)
    assert "mails: dead-letter queue cannot be read" in said(denied, workers=0)

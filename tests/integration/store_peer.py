"""Run processes that use a store at the same time, for tests of races.

``python -m tests.integration.store_peer URL DATABASE SOCKET ...`` takes the URL of the store and
Django's settings of its database (JSON, or ``null`` without Django). It forks one process, a peer,
for each socket. A test sends ``[function, *arguments]`` as a line of JSON, and the peer calls the
function and sends the result as a line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from celery import Celery

from celery_sqs_backoff import SQSBackoffTask
from celery_sqs_backoff.safe import Busy
from celery_sqs_backoff.safe.document import Document
from celery_sqs_backoff.store.records import Records
from celery_sqs_backoff.store.settings import open_store

from .django_app import project


class Peer:
    """A peer, as the test sees it. ``ask`` sends a call, and ``answer`` waits for its result."""

    def __init__(self, sent: IO[str], received: IO[str]) -> None:
        self._sent = sent
        self._received = received
        self.ask("ready")

    def ask(self, function: str, *arguments: Any) -> None:
        self._sent.write(json.dumps([function, *arguments]) + "\n")
        self._sent.flush()

    def answer(self) -> Any:
        line = self._received.readline()
        assert line, "the peer has ended"
        return json.loads(line)


@contextmanager
def forked_peers(url: str, database: dict[str, Any] | None, count: int) -> Iterator[list[Peer]]:
    """Yield several peers. They are forked after the imports, so they start fast."""
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [str(their.fileno()) for _, their in pairs]
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, url, json.dumps(database), *theirs],
            pass_fds=[*map(int, theirs)],
        )
        stack.callback(process.wait, 20)  # the peers end when their sockets are closed
        peers = []
        for our, their in pairs:
            their.close()
            stack.callback(our.close)
            sent, received = our.makefile("w"), our.makefile("r")
            stack.enter_context(sent)
            stack.enter_context(received)
            peers.append(Peer(sent, received))
        for peer in peers:
            assert peer.answer()
        yield peers


def _main(url: str, database: str, *sockets: str) -> None:
    if (settings := json.loads(database)) is not None:
        project.add_database("peer", settings)
        url = "django://peer"
    _import_what_it_needs(url)
    ours = [socket.socket(fileno=int(number)) for number in sockets]
    for own in ours:
        if os.fork() == 0:
            for other in ours:
                if other is not own:
                    other.close()  # otherwise the other peers would not see their sockets close
            _serve(url, own.makefile("r"), own.makefile("w"))
            os._exit(0)  # end at once, because Python's normal exit takes as long as the test
    for own in ours:
        own.close()
    for _ in ours:
        os.wait()


def _import_what_it_needs(url: str) -> None:
    """Import the store and its driver without opening a connection, which forks would share."""
    open_store(url)
    if url.startswith("django:"):
        from django.db import connections

        assert connections["peer"].connection is None


def _serve(url: str, asked: IO[str], answers: IO[str]) -> None:
    store = open_store(url)
    for line in asked:
        function, *arguments = json.loads(line)
        if function == "ready":
            answer: Any = True
        elif function == "step":
            answer = _step(_records(store), *arguments)
        elif function == "take_turns":
            answer = _take_turns(store, *arguments)
        else:
            answer = getattr(store, function)(*arguments)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _records(store: Any) -> Records:
    return Records(store, namespace="race", secrets=["secret"])


def _step(records: Records, scope: str, name: str) -> Any:
    """Do a step in a scope in which other peers do steps too."""
    document = Document(records, "steps", scope)
    return document.step(name, lambda: name, (), {})


def _take_turns(store: Any, key: str, path: str, turns: int) -> int:
    """Enter ``exclusive`` this often, and return how often no other process was inside."""
    app = Celery("race", set_as_current=False)
    app.conf.sqs_backoff = {"store": store}

    @app.task(name="race", base=SQSBackoffTask)
    def race() -> None: ...

    done = alone = 0
    while done < turns:
        with suppress(Busy), race.exclusive(key):
            done += 1
            with suppress(FileExistsError), open(path, "x"):
                time.sleep(0.005)
                alone += 1
                os.unlink(path)
    return alone


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""Delays forks while another thread sets up a TLS connection.

OpenSSL's locks do not survive a fork (https://github.com/openssl/openssl/issues/19066). A thread of
the worker holds such a lock while it loads certificates or makes a TLS handshake. If the pool forks
a process in that time, the lock stays locked in the new process. The new process hangs in its first
TLS connection, and its task never ends, so the worker keeps the task's message hidden for good.
Plain Celery does not have this problem, because there the thread that forks also calls SQS.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from botocore.awsrequest import AWSHTTPSConnection, AWSHTTPSConnectionPool

#: Longest wait of a fork for handshakes. The worker's event loop stands still while the fork waits,
#: and a server may never answer.
_LONGEST_WAIT_SECONDS = 1.0


class Handshakes:
    """The TLS handshakes under way in this process. Safe to use from any thread."""

    def __init__(self) -> None:
        self.after_in_child()

    def begin(self) -> object:
        """Note that a handshake begins. If a fork waits for handshakes, let the fork go first."""
        handshake = object()
        with self._cond:
            self._cond.wait_for(lambda: not self._fork_waits, _LONGEST_WAIT_SECONDS)
            self._under_way.add(handshake)
        return handshake

    def end(self, handshake: object) -> None:
        """Note the end of a handshake that :meth:`begin` returned."""
        with self._cond:
            self._under_way.discard(handshake)
            self._cond.notify_all()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count the ``with`` block as one handshake, because it may make a TLS connection."""
        handshake = self.begin()
        try:
            yield
        finally:
            self.end(handshake)

    def before_fork(self) -> None:
        """Hold up new handshakes, and wait a second at most for the handshakes under way.

        The next fork does not wait again for a handshake that has not ended in this second.
        Otherwise, if STS hangs for minutes, a pool that replaces many processes would wait a second
        for each of them.
        """
        self._cond.acquire()
        self._fork_waits = True
        self._cond.wait_for(lambda: not self._under_way, _LONGEST_WAIT_SECONDS)
        self._under_way.clear()

    def after_fork(self) -> None:
        self._fork_waits = False
        self._cond.notify_all()
        self._cond.release()

    def after_in_child(self) -> None:
        """Forget the handshakes, because their threads are not in this process."""
        self._cond = threading.Condition(threading.Lock())
        self._under_way: set[object] = set()
        self._fork_waits = False


#: The handshakes of this process.
handshakes = Handshakes()


@cache
def guard_forks() -> None:
    """Let each fork of this process wait for running handshakes, at most a second."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(
            before=handshakes.before_fork,
            after_in_parent=handshakes.after_fork,
            after_in_child=handshakes.after_in_child,
        )


def announce_handshakes(http_session: Any) -> None:
    """Record the TLS handshake of each connection that a client of botocore makes."""
    http_session._pool_classes_by_scheme["https"] = _Pool  # the connection managers share the dict


class _Connection(AWSHTTPSConnection):
    """A connection that notes its TLS handshake, but not the DNS lookup and TCP before it."""

    _handshake: object = None

    def _new_conn(self) -> Any:
        sock = super()._new_conn()
        self._handshake = handshakes.begin()
        return sock

    def connect(self) -> None:
        try:
            super().connect()
        finally:
            handshakes.end(self._handshake)


class _Pool(AWSHTTPSConnectionPool):
    ConnectionCls = _Connection

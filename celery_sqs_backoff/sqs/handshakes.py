"""No fork while another thread sets up a TLS connection.

OpenSSL's locks do not survive a fork (https://github.com/openssl/openssl/issues/19066). A pool
process that is forked while a thread of the worker loads certificates, or shakes hands, finds the
lock taken for good. It hangs in its first own TLS connection, and its task with it. The message of
the task stays held. Celery alone forks in the one thread that speaks to SQS.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from botocore.awsrequest import AWSHTTPSConnection, AWSHTTPSConnectionPool

#: The longest that a fork waits for handshakes, because the event loop stands still and
#: a server may be silent.
_LONGEST_WAIT_SECONDS = 1.0


class Handshakes:
    """Handshakes under way. Safe to use from any thread."""

    def __init__(self) -> None:
        self.after_in_child()

    def begin(self) -> object:
        """Note that a handshake begins, after the end of a fork that waits for handshakes."""
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
        """Count the block as one handshake, because it may make a TLS connection."""
        handshake = self.begin()
        try:
            yield
        finally:
            self.end(handshake)

    def before_fork(self) -> None:
        """Stop new handshakes, and wait a second at most for the running ones.

        The next fork does not wait for a handshake that this fork has waited for in vain. STS may
        be silent for minutes, in which a pool replaces many processes.
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
    """Let all forks of this process wait for handshakes."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(
            before=handshakes.before_fork,
            after_in_parent=handshakes.after_fork,
            after_in_child=handshakes.after_in_child,
        )


def announce_handshakes(http_session: Any) -> None:
    """Let the connections that a client of botocore makes be noted."""
    http_session._pool_classes_by_scheme["https"] = _Pool  # the connection managers share the dict


class _Connection(AWSHTTPSConnection):
    """A connection of which the wait for the server's address and for TCP holds up no fork."""

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

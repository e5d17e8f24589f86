"""Records in Redis. Its own clock decides when one ends; it also removes what has ended.

The server must keep what it was told: with ``maxmemory-policy`` other than ``noeviction`` (or
``volatile-*`` with room to spare), or without persistence, a record may be gone before its time.
A replica that takes over may miss the last records too: Redis replicates asynchronously
(https://redis.io/docs/latest/operate/oss_and_stack/management/replication/).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ..errors import StoreUnavailable

__all__ = ["RedisStore"]

F = TypeVar("F", bound=Callable[..., Any])

#: Names of ours among whatever else the database holds.
_PREFIX = "celery-sqs-backoff:"

_TIMEOUT_SECONDS = 5.0

_ADD = """
local value = redis.call('GET', KEYS[1])
if value then return value end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
"""
_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
_DELETE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


def _boundary(method: F) -> F:
    """Turn what redis-py raises for a server that is away into ours."""

    @wraps(method)
    def wrapped(self: RedisStore, *args: Any) -> Any:
        from redis.exceptions import RedisError

        try:
            return method(self, *args)
        except RedisError as exc:
            raise StoreUnavailable(f"Redis: {type(exc).__name__}") from exc

    return wrapped  # type: ignore[return-value]


class RedisStore:
    """Records in one Redis database, each change one script.

    Arguments:
        url: as for ``redis.Redis.from_url``: ``redis://``, ``rediss://`` (TLS) or ``unix://``.
            Options in its query, such as ``?socket_timeout=2`` (seconds; default 5), are
            redis-py's.
    """

    def __init__(self, url: str) -> None:
        from redis import Redis

        self._redis: Any = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
        )
        self._add = self._redis.register_script(_ADD)
        self._replace = self._redis.register_script(_REPLACE)
        self._delete = self._redis.register_script(_DELETE)

    @_boundary
    def add(self, key: str, value: str, ttl: float) -> str | None:
        there: str | None = self._add(keys=[_PREFIX + key], args=[value, _milliseconds(ttl)])
        return there

    @_boundary
    def get(self, key: str) -> str | None:
        value: str | None = self._redis.get(_PREFIX + key)
        return value

    @_boundary
    def replace(self, key: str, old: str, new: str, ttl: float) -> bool:
        return bool(self._replace(keys=[_PREFIX + key], args=[old, new, _milliseconds(ttl)]))

    @_boundary
    def delete(self, key: str, old: str) -> bool:
        return bool(self._delete(keys=[_PREFIX + key], args=[old]))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))

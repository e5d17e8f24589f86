"""Records in Redis, whose clock decides when one ends, and which removes it then.

The server must keep what it was told: with another ``maxmemory-policy`` than ``noeviction``, or
without persistence, a record may be gone before its time. (``volatile-*`` is no better: each record
has an end.)
A replica that takes over may miss the last records too: Redis replicates asynchronously
(https://redis.io/docs/latest/operate/oss_and_stack/management/replication/).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .errors import RecordRejected, StoreRefused, StoreUnavailable

#: Names of ours among whatever else the database holds.
_PREFIX = "celery-sqs-backoff:"

_TIMEOUT_SECONDS = 5.0

_GET = "return redis.call('GET', KEYS[1])"
_ADD = """
local value = redis.call('GET', KEYS[1])
if value then return value end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return false
"""
_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local ttl = ARGV[3]
if ttl == '' then ttl = redis.call('PTTL', KEYS[1]) end
if tonumber(ttl) < 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ttl)
return 1
"""
_DELETE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


def _kind_of(exc: Exception) -> type[StoreUnavailable]:
    """Tell a server that refuses from one that is away, full or a replica for now."""
    from redis import exceptions

    if isinstance(exc, exceptions.AuthenticationError | exceptions.AuthorizationError):
        return StoreRefused
    passes = (exceptions.ReadOnlyError, exceptions.OutOfMemoryError)
    if not isinstance(exc, exceptions.ResponseError) or isinstance(exc, passes):
        return StoreUnavailable
    # An error inside a script has no class of its own before Redis 7.
    texts = ("OOM", "LOADING", "READONLY", "BUSY")
    return StoreUnavailable if any(text in str(exc) for text in texts) else StoreRefused


class RedisStore:
    """Records in one Redis database, each change one script.

    Arguments:
        url: as for ``redis.Redis.from_url``: ``redis://``, ``rediss://`` (TLS) or ``unix://``.
            Options in its query, such as ``?socket_timeout=2`` (seconds; default 5), are
            redis-py's.

    Raises:
        ValueError, TypeError, LookupError: redis-py does not take the URL or an option of it.
    """

    def __init__(self, url: str) -> None:
        from redis import Redis, RedisError

        self._redis: Any = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
        )
        pool = self._redis.connection_pool
        try:
            pool.connection_class(**pool.connection_kwargs)  # not connected: checks the options
            "text".encode(pool.connection_kwargs.get("encoding", "utf-8"))
        except RedisError:
            raise ValueError("an option of the URL is invalid") from None

    def evicts(self) -> str | None:
        """Return the setting by which the server drops records before their end, if there is one.

        ``None`` too if it does not say: it is away, or the user may not ask. (``CONFIG GET`` would
        say it too, but managed servers refuse that.)
        """
        from redis.exceptions import RedisError

        try:
            memory = self._redis.info("memory")
        except RedisError:
            return None
        policy, limit = memory.get("maxmemory_policy"), memory.get("maxmemory")
        if not limit or policy in (None, "noeviction"):
            return None
        return f"Redis has maxmemory {limit} bytes, and maxmemory-policy {policy}"

    def add(self, key: str, value: str, ttl: float) -> str | None:
        there: str | None = self.run_script(_ADD, key, value, _milliseconds(ttl))
        return there

    def get(self, key: str) -> str | None:
        value: str | None = self.run_script(_GET, key)
        return value

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        end = "" if ttl is None else _milliseconds(ttl)
        return bool(self.run_script(_REPLACE, key, old, new, end))

    def delete(self, key: str, old: str) -> bool:
        return bool(self.run_script(_DELETE, key, old))

    def run_script(self, script: str, key: str, *arguments: object) -> Any:
        """Run a script on one key, and once more if a new connection may help.

        The second run may find that the first one took effect: see ``Store``.
        """
        from redis import exceptions

        gone = (exceptions.ConnectionError, exceptions.ReadOnlyError)
        run = partial(self._redis.register_script(script), keys=[_PREFIX + key], args=arguments)
        try:
            try:
                return run()
            except exceptions.RedisError as exc:
                # Before Redis 7, only the text of a script's error says so.
                if not isinstance(exc, gone) and "READONLY" not in str(exc):
                    raise
                # The connection was idle for too long. Or the server has become a replica: the
                # address may lead to the one that took over, which only a new connection finds out.
                self._redis.connection_pool.disconnect(inuse_connections=False)
                return run()
        except exceptions.RedisError as exc:
            raise _kind_of(exc)(f"Redis: {type(exc).__name__}") from exc
        except UnicodeDecodeError:
            raise RecordRejected("A record in the store is not text: it is not ours") from None


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))

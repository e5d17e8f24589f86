"""Records in Redis. Its clock decides when one ends, and it removes the record then.

The server must keep all records: with another ``maxmemory-policy`` than ``noeviction``, or
without persistence, a record may be gone before its time. (``volatile-*`` is no better: each record
has an end.)
A replica that takes over may miss the last records too: Redis replicates asynchronously
(https://redis.io/docs/latest/operate/oss_and_stack/management/replication/).
"""

from __future__ import annotations

from typing import Any

from .errors import RecordRejected, StoreRefused, StoreUnavailable

#: Names of ours among whatever else the database holds.
_PREFIX = "celery-sqs-backoff:"

_TIMEOUT_SECONDS = 5.0

_GET = "return redis.call('GET', KEYS[1])"
# Not SET with NX and GET: a full server refuses that for a record that is there.
_ADD = """
local value = redis.call('GET', KEYS[1])
if value then return value end
redis.call('SET', KEYS[1], ARGV[1], unpack(ARGV, 2))
return false
"""
_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], unpack(ARGV, 3))
return 1
"""
_DELETE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class RedisStore:
    """Records in one Redis database, each change one script. Redis 7 or later.

    Arguments:
        url: as for ``redis.Redis.from_url``: ``redis://``, ``rediss://`` (TLS) or ``unix://``.
            Options in its query, such as ``?socket_timeout=2`` (seconds; default 5), are
            redis-py's.

    Raises:
        ValueError, TypeError, LookupError: redis-py does not take the URL or an option of it.
    """

    def __init__(self, url: str) -> None:
        from redis import Redis, exceptions
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # A new connection helps if the old one was idle for too long. Or if the server has become
        # a replica: the address may lead to the one that took over. The second call may find that
        # the first one took effect: see ``Store``.
        gone = (exceptions.ConnectionError, exceptions.ReadOnlyError)
        self._redis: Any = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 1, supported_errors=gone),
            retry_on_error=list(gone),
        )
        pool = self._redis.connection_pool
        try:
            pool.connection_class(**pool.connection_kwargs)  # not connected: checks the options
            "text".encode(pool.connection_kwargs.get("encoding", "utf-8"))
        except exceptions.RedisError:
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
        there: str | None = self.run_script(_ADD, key, value, *_end(ttl))
        return there

    def get(self, key: str) -> str | None:
        value: str | None = self.run_script(_GET, key)
        return value

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        end = ("KEEPTTL",) if ttl is None else _end(ttl)
        return bool(self.run_script(_REPLACE, key, old, new, *end))

    def delete(self, key: str, old: str) -> bool:
        return bool(self.run_script(_DELETE, key, old))

    def run_script(self, script: str, key: str, *arguments: object) -> Any:
        """Run a script on one key."""
        from redis import exceptions

        try:
            return self._redis.register_script(script)([_PREFIX + key], arguments)
        except exceptions.RedisError as exc:
            refusals = (exceptions.AuthenticationError, exceptions.AuthorizationError)
            passes = (exceptions.ReadOnlyError, exceptions.OutOfMemoryError)
            is_refused = isinstance(exc, exceptions.ResponseError) and not isinstance(exc, passes)
            if str(exc).startswith("BUSY"):  # another client's script runs for long
                is_refused = False
            kind = StoreRefused if is_refused or isinstance(exc, refusals) else StoreUnavailable
            raise kind(f"Redis: {type(exc).__name__}") from exc
        except UnicodeDecodeError:
            raise RecordRejected("A record in the store is not text: it is not ours") from None


def _end(seconds: float) -> tuple[str, int]:
    return "PX", max(1, round(seconds * 1000))

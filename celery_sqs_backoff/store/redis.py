"""Keep records in Redis. The server's clock decides when a record ends, and the server deletes it.

A record may be lost early if the server's ``maxmemory-policy`` is not ``noeviction``, or if the
server has no persistence. (``volatile-*`` policies may drop any record, because each has an end.) A
replica that takes over may also lack the last records, because Redis replicates asynchronously
(https://redis.io/docs/latest/operate/oss_and_stack/management/replication/).
"""

from __future__ import annotations

from typing import Any

from .errors import RecordRejected, StoreRefused, StoreUnavailable

#: Prefix of all keys of this package, because the database may hold other keys, too.
_PREFIX = "celery-sqs-backoff:"

_TIMEOUT_SECONDS = 5.0

_GET = "return redis.call('GET', KEYS[1])"
# SET with NX and GET would do the same, but a full server refuses it even for an existing record.
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
    """Keeps records in one Redis database. Each change is one script. Needs Redis 7 or later.

    Arguments:
        url: as for ``redis.Redis.from_url``: ``redis://``, ``rediss://`` (TLS) or ``unix://``. Its
            query takes options of redis-py, such as ``?socket_timeout=2`` (seconds; default 5).

    Raises:
        ValueError, TypeError, LookupError: redis-py refuses the URL or an option in it.
    """

    def __init__(self, url: str) -> None:
        from redis import Redis, exceptions
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        # Retry a failed call once, on a new connection. This helps if the old connection was idle
        # for too long, or if the server has become a replica and the address leads to the new
        # primary. The first call may have taken effect before the retry (see ``Store``).
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
            pool.connection_class(**pool.connection_kwargs)  # checks the options, does not connect
            "text".encode(pool.connection_kwargs.get("encoding", "utf-8"))
        except exceptions.RedisError:
            raise ValueError("an option of the URL is invalid") from None

    def evicts(self) -> str | None:
        """Return the setting by which the server may drop records before their end.

        ``None`` = there is no such setting, the server is down, or the user may not call ``INFO``.
        (``CONFIG GET`` has the setting, too, but managed servers refuse that command.)
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
        there: str | None = self._run_script(_ADD, key, value, *_end(ttl))
        return there

    def get(self, key: str) -> str | None:
        value: str | None = self._run_script(_GET, key)
        return value

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        end = ("KEEPTTL",) if ttl is None else _end(ttl)
        return bool(self._run_script(_REPLACE, key, old, new, *end))

    def delete(self, key: str, old: str) -> bool:
        return bool(self._run_script(_DELETE, key, old))

    def _run_script(self, script: str, key: str, *arguments: object) -> Any:
        from redis import exceptions

        try:
            return self._redis.register_script(script)([_PREFIX + key], arguments)
        except exceptions.RedisError as exc:
            refusals = (exceptions.AuthenticationError, exceptions.AuthorizationError)
            passes = (exceptions.ReadOnlyError, exceptions.OutOfMemoryError)
            is_refused = isinstance(exc, exceptions.ResponseError) and not isinstance(exc, passes)
            if str(exc).startswith("BUSY"):  # a script of another client has run for too long
                is_refused = False
            kind = StoreRefused if is_refused or isinstance(exc, refusals) else StoreUnavailable
            raise kind(f"Redis: {type(exc).__name__}") from exc
        except UnicodeDecodeError:
            raise RecordRejected(
                "a record in the store is not text: another program wrote it"
            ) from None


def _end(seconds: float) -> tuple[str, int]:
    return "PX", max(1, round(seconds * 1000))

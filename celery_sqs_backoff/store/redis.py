"""Records in Redis. Its own clock decides when one ends; it also removes what has ended.

The server must keep what it was told: with another ``maxmemory-policy`` than ``noeviction``, or
without persistence, a record may be gone before its time. (``volatile-*`` is no better: each record
has an end.)
A replica that takes over may miss the last records too: Redis replicates asynchronously
(https://redis.io/docs/latest/operate/oss_and_stack/management/replication/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from .errors import RecordRejected, StoreRefused, StoreUnavailable

F = TypeVar("F", bound=Callable[..., Any])

#: Names of ours among whatever else the database holds.
_PREFIX = "celery-sqs-backoff:"

_TIMEOUT_SECONDS = 5.0

#: Lua cannot read infinity.
_NO_LIMIT_SECONDS = 1e9

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
#: ``provider.rate.assign``, by the server's clock. Times are milliseconds.
_TAKE_SLOTS = """
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local worker, present = 'worker:' .. ARGV[1], tonumber(ARGV[2])
local slot_apart, back_apart = tonumber(ARGV[4]), tonumber(ARGV[5])
local free, back, workers = 0, 0, 1
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local value = tonumber(fields[i + 1])
  if fields[i] == 'free' then free = value
  elseif fields[i] == 'back' then back = value
  elseif fields[i] ~= worker then
    if value > now - present then workers = workers + 1
    else redis.call('HDEL', KEYS[1], fields[i]) end
  end
end
local places = {}
for i = 6, #ARGV do
  local slot = math.max(free, now)
  if slot - now <= tonumber(ARGV[i]) then
    places[i - 5] = string.format('1 %.3f', slot - now)
    free = slot + slot_apart
  else
    back = math.max(back, slot)
    places[i - 5] = string.format('0 %.3f', back - now)
    back = back + back_apart
  end
end
redis.call('HSET', KEYS[1], 'free', string.format('%.3f', free),
           'back', string.format('%.3f', back), worker, string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(free, back, now) - now + ARGV[3]))
return {workers, unpack(places)}
"""


def _boundary(method: F) -> F:
    """Turn what redis-py raises into ours, after a second attempt if a new connection may help.

    Made again, a call may have taken effect before: see ``Store``.
    """

    @wraps(method)
    def wrapped(self: RedisStore, *args: Any, **kwargs: Any) -> Any:
        from redis import exceptions

        gone = (exceptions.ConnectionError, exceptions.ReadOnlyError)
        try:
            try:
                return method(self, *args, **kwargs)
            except exceptions.RedisError as exc:
                # Before Redis 7, of a script only the text says so.
                if not isinstance(exc, gone) and "READONLY" not in str(exc):
                    raise
                # The connection was idle for too long. Or the server has become a replica: the
                # address may lead to the one that took over, which only a new connection finds out.
                self._redis.connection_pool.disconnect(inuse_connections=False)
                return method(self, *args, **kwargs)
        except exceptions.RedisError as exc:
            raise _kind_of(exc)(f"Redis: {type(exc).__name__}") from exc
        except UnicodeDecodeError:
            raise RecordRejected("A record in the store is not text: it is not ours") from None

    return wrapped  # type: ignore[return-value]


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
        except RedisError:
            raise ValueError("an option of the URL is invalid") from None
        self._add = self._redis.register_script(_ADD)
        self._replace = self._redis.register_script(_REPLACE)
        self._delete = self._redis.register_script(_DELETE)
        self._take_slots = self._redis.register_script(_TAKE_SLOTS)

    def evicts(self) -> str | None:
        """Say by which setting the server drops records before their end; ``None``: by none.

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

    @_boundary
    def add(self, key: str, value: str, ttl: float) -> str | None:
        there: str | None = self._add(keys=[_PREFIX + key], args=[value, _milliseconds(ttl)])
        return there

    @_boundary
    def get(self, key: str) -> str | None:
        value: str | None = self._redis.get(_PREFIX + key)
        return value

    @_boundary
    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        end = "" if ttl is None else _milliseconds(ttl)
        return bool(self._replace(keys=[_PREFIX + key], args=[old, new, end]))

    @_boundary
    def delete(self, key: str, old: str) -> bool:
        return bool(self._delete(keys=[_PREFIX + key], args=[old]))

    @_boundary
    def take_slots(
        self,
        key: str,
        worker: str,
        longest: Sequence[float],
        apart: tuple[float, float],
        present: float,
        keep: float,
    ) -> tuple[list[tuple[float, bool]], int]:
        """Assign places at a rate: see ``provider.fleet``."""
        waits = [min(seconds, _NO_LIMIT_SECONDS) * 1000 for seconds in longest]
        times = [_milliseconds(present), _milliseconds(keep), *(each * 1000 for each in apart)]
        workers, *places = self._take_slots(keys=[_PREFIX + key], args=[worker, *times, *waits])
        split = [place.split() for place in places]
        return [(float(wait) / 1000, is_slot == "1") for is_slot, wait in split], int(workers)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))

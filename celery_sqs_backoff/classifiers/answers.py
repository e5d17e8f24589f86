"""Read from an HTTP answer whether the call was processed, and how long to wait for a retry.

The functions make no calls. Only ``read_answer`` reads the clock.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import Any

from .exchange import Diagnosis, Meaning


@dataclass(frozen=True)
class StatusRule:
    """A row of the table of statuses. An answer gets the meaning of the first row that fits it."""

    statuses: Collection[int]
    means: Meaning
    why: str
    #: A condition on the answer's headers, or empty.
    only: str = ""


#: Conditions of rules, as the documentation prints them. Headers of an exhausted rate limit also
#: ask to wait. They do not count as ``Retry-After``, because they do not prove that the request was
#: refused: a gateway may add them to its answer even after it has passed the request on.
ASKS_TO_WAIT, HAS_RETRY_AFTER = "that ask to wait", "with `Retry-After`"
OF_A_CACHE = "with `Server: Varnish`"  # a cache made the answer itself


#: The rules follow https://www.rfc-editor.org/rfc/rfc9110.html, unless they name another source.
STATUSES: tuple[StatusRule, ...] = (
    StatusRule(
        (408,),
        Meaning.REFUSED_FOR_NOW,
        "the server did not receive the whole request (RFC 9110, 15.5.9)",
    ),
    StatusRule(
        (409,),
        Meaning.IN_DOUBT,
        "the conflict may be with an earlier attempt at the same call (RFC 9110, 15.5.10)",
    ),
    StatusRule(
        (421, 423, 425, 429),
        Meaning.REFUSED_FOR_NOW,
        "a wrong connection (RFC 9110, 15.5.20), a locked resource (RFC 4918, 11.3), too early"
        " (RFC 8470, 5.2), too many requests (RFC 6585, 4)",
    ),
    StatusRule(
        (460, 499),
        Meaning.IN_DOUBT,
        "from a load balancer or nginx: the client disconnected before the provider answered"
        " (https://docs.aws.amazon.com/elasticloadbalancing/latest/application/"
        "load-balancer-troubleshooting.html)",
    ),
    StatusRule(
        range(400, 500),
        Meaning.REFUSED_FOR_NOW,
        "`Retry-After`, or an exhausted rate limit (RFC 9110, 15.5.14; GitHub answers 403 in"
        " this case)",
        only=ASKS_TO_WAIT,
    ),
    StatusRule(
        range(400, 500),
        Meaning.REFUSED,
        "the same request gets the same answer (RFC 9110, 15.5)",
    ),
    StatusRule(
        (501, 505),
        Meaning.REFUSED,
        "the server does not support such requests (RFC 9110, 15.6.2 and 15.6.6)",
    ),
    StatusRule(
        (503,),
        Meaning.UNAVAILABLE,
        "Varnish and Fastly send `Retry-After` with each of their own 503s, even after they have"
        " passed the request on (https://github.com/varnishcache/varnish-cache/blob/master/bin/"
        "varnishd/builtin.vcl, `vcl_backend_error`); RETRYABLE with `trust_503=True`",
        only=OF_A_CACHE,
    ),
    StatusRule(
        (503,),
        Meaning.REFUSED_FOR_NOW,
        "the server says that the failure is temporary (RFC 9110, 15.6.4)",
        only=HAS_RETRY_AFTER,
    ),
    StatusRule(
        (503,),
        Meaning.UNAVAILABLE,
        "Envoy and Heroku send a 503 even after they have passed the request on; RETRYABLE with"
        " `trust_503=True`",
    ),
    StatusRule(
        (521, 523, 525, 526),
        Meaning.NOT_SENT,
        "Cloudflare could not connect to the provider",
    ),
    StatusRule(
        range(500, 600),
        Meaning.IN_DOUBT,
        "the server failed in its work, or a gateway had passed the request on"
        " (RFC 9110, 15.6.1, 15.6.3 and 15.6.5)",
    ),
)

# The reset of a rate limit is a delay in seconds or a time since the epoch. From ``_EPOCH`` up it
# is a time, because a delay of 31 years makes no sense. From ``_EPOCH_MILLISECONDS`` up, the time
# is in milliseconds.
_EPOCH = 1e9
_EPOCH_MILLISECONDS = 1e12


def answer(status: object, headers: object = None, *, now: float) -> Diagnosis | None:
    """Return the diagnosis of an HTTP answer, or ``None`` if its status is below 400.

    Args:
        status: the status code. If it is not an int, the function returns ``None``.
        headers: an object with ``items()``. The case of names does not matter. ``None`` = no
            headers are known.
        now: seconds since the epoch, to convert a time in a header into a delay.
    """
    if not isinstance(status, int) or isinstance(status, bool):
        return None
    fields = _lower(headers)
    asked = read_asked_seconds(fields, now=now)
    has_retry_after = _retry_after_seconds(fields.get("retry-after"), now) is not None
    if asked is None and status == 429:
        # A 429 always asks to wait, even if it does not say how long.
        asked = _reset_seconds(fields, now) or 0.0
    holds = {
        "": True,
        ASKS_TO_WAIT: asked is not None,
        HAS_RETRY_AFTER: has_retry_after,
        # Varnish does not change this header of an answer that it passes on, so its name there
        # shows that Varnish made the answer itself.
        OF_A_CACHE: fields.get("server", "").lower() == "varnish",
    }
    rules = (rule for rule in STATUSES if status in rule.statuses and holds[rule.only])
    return next((Diagnosis(rule.means, asked) for rule in rules), None)


def read_asked_seconds(headers: object, *, now: float) -> float | None:
    """Return the seconds (0 or more) that the provider asked to wait. ``None`` = it did not ask.

    ``Retry-After`` may be seconds or an HTTP date (RFC 9110, 10.2.3). Without this header, the
    function uses the time until the rate limit is reset, if the rate limit is used up. Providers
    send this time as ``RateLimit-Reset`` (seconds) or ``X-RateLimit-Reset`` (seconds, or a time
    since the epoch). The structured header ``RateLimit`` of the later drafts is not read
    (https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/).
    """
    fields = _lower(headers)
    asked = _retry_after_seconds(fields.get("retry-after"), now)
    left = (fields.get("ratelimit-remaining"), fields.get("x-ratelimit-remaining"))
    if asked is None and "0" in left:
        asked = _reset_seconds(fields, now)
    return asked


def may_have_acted(response: Any) -> bool:
    """Return whether the server may have processed the request before it sent this answer.

    Call this only for an answer after which the HTTP client sent another request. Such an answer
    has one of three meanings. After a redirect, the server may have processed the request. The
    redirects 307 and 308 ask the client to repeat the request elsewhere, so it was not processed
    (RFC 9110, 15.4.8 and 15.4.9). Any other answer has refused the request, for example a 401 that
    asks for digest authentication.
    """
    return _status(response) in range(300, 400) and _status(response) not in (307, 308)


def read_answer(response: Any) -> Diagnosis | None:
    """Return the diagnosis of a response object, by its status and headers.

    The status is the response's attribute ``status_code`` or ``status``.
    """
    return answer(_status(response), getattr(response, "headers", None), now=time.time())


def _status(response: Any) -> Any:
    return getattr(response, "status_code", None) or getattr(response, "status", None)


def _lower(headers: object) -> dict[str, str]:
    items = getattr(headers, "items", None)
    if headers is None or not callable(items):
        return {}
    return {str(name).lower(): str(value).strip() for name, value in items()}


def _retry_after_seconds(value: str | None, now: float) -> float | None:
    if value is None:
        return None
    if (seconds := _number(value)) is not None:
        return seconds
    try:
        date = parsedate_to_datetime(value)
        if date.tzinfo is None:  # no zone, an unknown zone or "-0000": HTTP dates are in GMT
            date = date.replace(tzinfo=timezone.utc)
        return max(0.0, date.timestamp() - now)
    except (ValueError, OverflowError):
        return None


def _reset_seconds(fields: Mapping[str, str], now: float) -> float | None:
    for name in ("ratelimit-reset", "x-ratelimit-reset"):
        if (value := _number(fields.get(name, ""))) is not None:
            if value >= _EPOCH_MILLISECONDS:
                value /= 1000
            return max(0.0, value - now) if value >= _EPOCH else value
    return None


def _number(text: str) -> float | None:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None

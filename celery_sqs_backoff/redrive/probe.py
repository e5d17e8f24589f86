"""Call a probe before the first message and every 5 seconds.

A probe is a URL or a function that the user gives. It reports whether the provider (the service
that the tasks call) is healthy.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from kombu.utils.imports import symbol_by_name

from ..threads import call_in_time
from .events import Ended
from .halt import Halt

#: The provider counts as down if the probe returns ``False``, raises an exception, or takes more
#: than 5 s. After any other result, even ``None``, the provider counts as healthy.
Probe: TypeAlias = Callable[[], object]

_PROBE_TIMEOUT_SECONDS = 5.0
_PROBE_INTERVAL_SECONDS = 5.0

#: Failed probes in a row that stop the run.
_FAILED_PROBES = 3


def parse_probe(value: str | Probe | None) -> Probe | None:
    """Return a probe for a URL, a text ``"module:callable"``, or a callable. ``None`` = no probe.

    The probe of a URL sends a GET. The provider is healthy if it answers 2xx within 5 s, without a
    redirect.

    Raises:
        ValueError: the text has another form, or the callable cannot be imported.
    """
    if value is None or callable(value):
        return value
    if value.startswith(("http://", "https://")):
        return partial(_is_healthy, value)
    if not all(value.partition(":")):
        raise ValueError(f"invalid probe {value!r}: expected a URL or 'module:callable'")
    try:
        found = symbol_by_name(value)
    except Exception as exc:  # the user's module may raise any exception
        why = f"invalid probe {value!r}: it cannot be imported ({type(exc).__name__})"
        raise ValueError(why) from exc
    if not callable(found):
        raise ValueError(f"invalid probe {value!r}: it is not callable")
    probe: Probe = found
    return probe


def _is_healthy(url: str) -> bool:
    # A redirect often leads to a login page, which answers 200 even if the provider is down.
    with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_SECONDS) as response:
        return bool(200 <= response.status < 300 and response.url == url)


def _why_not(probe: Probe) -> str | None:
    try:
        good = probe()
    except urllib.error.HTTPError as exc:
        return f"the probe failed: HTTP {exc.code}"
    except BaseException as exc:  # noqa: BLE001  # any exception means that the probe failed
        # Leave out the exception's text: it may hold a credential or terminal control codes.
        return f"the probe failed: {type(exc).__name__}"
    return "the probe returned False" if good is False else None


class ProbeGate:
    """Ends a run when its probe fails three times in a row.

    Arguments:
        probe: reports the provider's health; ``None`` = the gate never ends the run.
        halt: ends the run.
    """

    def __init__(self, probe: Probe | None, halt: Halt) -> None:
        self._probe, self._halt = probe, halt
        self._failed = 0
        self._next_probe = 0.0

    def why_closed(self) -> str | None:
        """Call the probe. Return why it failed, or ``None`` if it passed or there is no probe."""
        if self._probe is None:
            return None
        asked = call_in_time(partial(_why_not, self._probe), seconds=_PROBE_TIMEOUT_SECONDS)
        if asked is None:
            return "the probe was not called: the machine allows no further thread"
        if not asked.done():  # the probe hangs in its own thread, so the run can go on
            return f"the probe has not answered within {_PROBE_TIMEOUT_SECONDS:g} s"
        return asked.result()

    def watch(self, now: float) -> None:
        """Call the probe every five seconds, and end the run after three failures in a row.

        One thread calls this method about once a second. ``now``: seconds, by the run's clock.
        """
        if self._probe is None or now < self._next_probe:
            return
        self._next_probe = now + _PROBE_INTERVAL_SECONDS
        why = self.why_closed()
        self._failed = self._failed + 1 if why else 0
        if self._failed >= _FAILED_PROBES:
            self._halt(Ended.GATE, f"{why} ({self._failed} times in a row)")

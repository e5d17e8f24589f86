"""Ask a probe whether the provider is well, before the first message and every 5 seconds."""

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

#: Healthy unless it returns ``False``, raises, or takes longer than 5 s.
Probe: TypeAlias = Callable[[], object]

_PROBE_TIMEOUT_SECONDS = 5.0
_PROBE_INTERVAL_SECONDS = 5.0

#: Failed probes in a row that stop the run.
_FAILED_PROBES = 3


def parse_probe(value: str | Probe | None) -> Probe | None:
    """Make a probe of a URL (2xx to a GET within 5 s is good), ``"module:callable"`` or a callable.

    Raises:
        ValueError: it has another form, or the callable cannot be imported.
    """
    if value is None or callable(value):
        return value
    if value.startswith(("http://", "https://")):
        return partial(_is_well, value)
    if not all(value.partition(":")):
        raise ValueError(f"invalid probe {value!r}: expected a URL or 'module:callable'")
    try:
        found = symbol_by_name(value)
    except Exception as exc:  # a user's module: it may raise anything
        why = f"invalid probe {value!r}: it cannot be imported ({type(exc).__name__})"
        raise ValueError(why) from exc
    if not callable(found):
        raise ValueError(f"invalid probe {value!r}: it is not callable")
    probe: Probe = found
    return probe


def _is_well(url: str) -> bool:
    # A redirect is not an answer of the provider: often it leads to a login page that is well.
    with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_SECONDS) as response:
        return bool(200 <= response.status < 300 and response.url == url)


def _why_not(probe: Probe) -> str | None:
    try:
        good = probe()
    except urllib.error.HTTPError as exc:
        return f"the probe failed: HTTP {exc.code}"
    except BaseException as exc:  # noqa: BLE001  # a user's probe: whatever it raises is a no
        # Not its text: that is the provider's, and may hold a credential or a terminal's orders.
        return f"the probe failed: {type(exc).__name__}"
    return "the probe said no" if good is False else None


class ProbeGate:
    """Ends a run when its probe keeps failing.

    Arguments:
        probe: ``None`` = the provider is not asked.
    """

    def __init__(self, probe: Probe | None, halt: Halt) -> None:
        self._probe, self._halt = probe, halt
        self._failed = 0
        self._next_probe = 0.0

    def why_closed(self) -> str | None:
        """Ask the provider. Return ``None`` if it is well, or is not to be asked."""
        if self._probe is None:
            return None
        asked = call_in_time(partial(_why_not, self._probe), seconds=_PROBE_TIMEOUT_SECONDS)
        if asked is None:
            return "the probe was not asked: no thread is left"
        if not asked.done():  # if it hangs, it does so alone
            return f"the probe has not answered within {_PROBE_TIMEOUT_SECONDS:g} s"
        return asked.result()

    def watch(self, now: float) -> None:
        """Ask the provider if it is time to. Called about once a second, by one thread."""
        if self._probe is None or now < self._next_probe:
            return
        self._next_probe = now + _PROBE_INTERVAL_SECONDS
        why = self.why_closed()
        self._failed = self._failed + 1 if why else 0
        if self._failed >= _FAILED_PROBES:
            self._halt(Ended.GATE, f"{why} ({self._failed} times in a row)")

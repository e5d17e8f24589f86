"""``Provider``: what a task says about the service that it calls."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ..retry.policies import to_seconds
from ..units import parse_rate
from .health import Thresholds
from .recall import DEFAULT_LIMIT
from .tenant import Template

__all__ = ["Provider"]


#: Calls that a gate looks back on, at the most.
_MOST_CALLS = 10_000


@dataclass(frozen=True, init=False)
class Provider:
    """A service that tasks call, and that can be down for all of them at once.

    Tasks with a provider of the same name share its state in a worker. While the provider is down,
    their messages are hidden without running, except for one probe at a time. Hidden messages are
    no attempts, but ``retry_for`` goes on.

    Args:
        name: of the provider, in logs and signals. Not empty.
        failures: failures that open the gate, in doubt or not, from 2 up. Default 6.
        share: of failures among the last ``ceil(failures / share)`` calls, above 0, at most 1.
            Default 0.9.
        messages: different messages that must have failed, from 2 up to ``failures``. Default 2.
        probe_interval: mean seconds (or timedelta) before the first probe, above 0. Default 5.
            Each interval is drawn between 3/4 and 5/4 of its mean.
        longest_probe_interval: the mean pause grows with the outage up to this. Default 60.
        recall: whether hidden messages are brought forward after the outage. ``None`` (default) =
            yes, except under a ``Schedule``, whose delays are exact. ``False`` also leaves out the
            rate of the recovery.
        remember: hidden messages that a worker remembers, about 1 KB each, from 0 up. Default
            20,000.
        rate: calls a second at the most: ``"60/s"``, ``"300/m"``, ``"7200/h"`` or a number.
            ``None`` (default) = no limit. One rate for all workers of all machines if the app
            names a store; without one each worker has it for itself: a fleet of ten takes ten
            times that.
        key: a provider that fails by tenant: a template of the task's arguments, such as
            ``"{account_id}"`` or ``"{0}"``. Each tenant has a gate, a recall and a rate of its own.
            ``None`` (default) = the provider fails for all alike.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message names it.
    """

    name: str
    thresholds: Thresholds
    recall: bool | None
    remember: int
    rate: float | None
    key: str | None

    def __init__(
        self,
        name: str,
        *,
        failures: int = 6,
        share: float = 0.9,
        messages: int = 2,
        probe_interval: float | timedelta = 5,
        longest_probe_interval: float | timedelta = 60,
        recall: bool | None = None,
        remember: int = DEFAULT_LIMIT,
        rate: str | float | None = None,
        key: str | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"invalid name {name!r}: expected text")
        if not name.strip():
            raise ValueError(f"invalid name {name!r}: expected text that is not empty")
        _check_count("failures", failures, 2)
        _check_count("messages", messages, 2)
        _check_count("remember", remember, 0)
        if messages > failures:
            raise ValueError(f"invalid messages {messages}: expected at most failures={failures}")
        if isinstance(share, bool) or not isinstance(share, int | float):
            raise TypeError(f"invalid share {share!r}: expected a number")
        if not 0 < share <= 1:
            raise ValueError(f"invalid share {share!r}: expected above 0, at most 1")
        if failures / share > _MOST_CALLS:
            raise ValueError(
                f"invalid share {share!r}: expected failures / share of at most {_MOST_CALLS:,}"
            )
        if recall is not None and not isinstance(recall, bool):
            raise TypeError(f"invalid recall {recall!r}: expected True, False or None")
        if key is not None and not isinstance(key, str):
            raise TypeError(f"invalid key {key!r}: expected text such as '{{account_id}}', or None")
        if key is not None:
            Template(key)
        first = to_seconds("probe_interval", probe_interval, may_be_zero=False)
        longest = to_seconds("longest_probe_interval", longest_probe_interval)
        if longest < first:
            raise ValueError(
                f"invalid longest_probe_interval {longest_probe_interval!r}:"
                f" expected at least probe_interval={probe_interval!r}"
            )
        put = object.__setattr__  # the way to fill a frozen dataclass
        put(self, "name", name)
        put(self, "thresholds", Thresholds(failures, messages, float(share), first, longest))
        put(self, "recall", recall)
        put(self, "remember", remember)
        put(self, "rate", parse_rate(rate))
        put(self, "key", key)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"invalid {name} {value!r}: expected a whole number")
    if value < least:
        raise ValueError(f"invalid {name} {value!r}: expected {least} or more")

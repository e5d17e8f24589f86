"""``Provider``, the settings of an outside service that tasks call."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ..retry.policies import Policy, Schedule, to_seconds
from ..units import parse_rate


@dataclass(frozen=True, init=False)
class Provider:
    """A service that tasks call, and that can be down for all of them.

    Tasks with a provider of the same name share its gate (circuit breaker) in a worker. While the
    provider is down, the gate is open. The worker then hides the messages of these tasks without
    running them, except for one message at a time, which runs as a probe. To hide a message
    uses up no attempt, but the time of its ``retry_for`` goes on.

    Args:
        name: name of the provider in logs and signals. Not empty.
        failures: the number of failed calls in a row that opens the gate, 2 or more. The calls
            must come from two messages or more. If a call has succeeded within the last
            ``probe_interval``, the worker only slows the calls down. Default 6.
        probe_interval: mean time from the opening of the gate to the first probe, in seconds or a
            timedelta, above 0. Default 5. The mean pause between later probes grows with the
            outage, up to a minute. Each pause is drawn between 3/4 and 5/4 of its mean.
        recall: whether SQS shows hidden messages early when the outage ends. ``None`` (default) =
            yes, except with a ``Schedule``, because its delays are exact.
        rate: the highest rate of calls: ``"60/s"``, ``"300/m"``, ``"7200/h"``, or a number of calls
            a second. ``None`` (default) = no limit. If the app names a store, all workers share the
            rate. Without a store each worker has the rate for itself, so ten workers make ten times
            as many calls.
        key: for a provider that can be down for one of your tenants alone, the name of the task's
            argument that holds the tenant, such as ``"account_id"``. Each tenant has a gate, a
            recall and a rate of its own. ``None`` (default) = one gate for all calls.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the error's text names the argument.
    """

    name: str
    failures: int
    probe_interval: float
    recall: bool | None
    rate: float | None
    key: str | None

    def __init__(
        self,
        name: str,
        *,
        failures: int = 6,
        probe_interval: float | timedelta = 5,
        recall: bool | None = None,
        rate: str | float | None = None,
        key: str | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"invalid name {name!r}: expected text")
        if not name.strip():
            raise ValueError(f"invalid name {name!r}: expected text that is not empty")
        if isinstance(failures, bool) or not isinstance(failures, int):
            raise TypeError(f"invalid failures {failures!r}: expected a whole number")
        if failures < 2:
            raise ValueError(f"invalid failures {failures!r}: expected 2 or more")
        if recall is not None and not isinstance(recall, bool):
            raise TypeError(f"invalid recall {recall!r}: expected True, False or None")
        if key is not None and not isinstance(key, str):
            raise TypeError(f"invalid key {key!r}: expected an argument's name, or None")
        if key is not None and not key.isidentifier():
            raise ValueError(f"invalid key {key!r}: expected an argument's name")
        put = object.__setattr__  # the way to fill a frozen dataclass
        put(self, "name", name)
        put(self, "failures", failures)
        put(self, "probe_interval", to_seconds("probe_interval", probe_interval, may_be_zero=False))
        put(self, "recall", recall)
        put(self, "rate", parse_rate(rate))
        put(self, "key", key)

    def recalls(self, policy: Policy) -> bool:
        """Return whether hidden messages of a task with this policy may be shown early."""
        return not isinstance(policy, Schedule) if self.recall is None else self.recall

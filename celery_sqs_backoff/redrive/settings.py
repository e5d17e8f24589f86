"""What a redrive is asked to do, checked."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

from ..sqs.limits import MAX_DELAY_SECONDS
from ..units import parse_duration, parse_rate
from .gate import Probe, parse_probe
from .select import Selection

__all__ = ["Expired", "Settings"]

Expired = Literal["leave", "extend"]


@dataclass(frozen=True, init=False)
class Settings:
    """The options of :func:`celery_sqs_backoff.redrive`, which documents them."""

    rate: float | None
    ramp: float
    spread: float
    selection: Selection
    limit: int | None
    max_replays: int
    probe: Probe | None
    expired: Expired
    include_unknown: bool
    delete: bool
    dump: Path | None
    restore: Path | None
    journal: Path | None
    force: bool

    def __init__(
        self,
        *,
        rate: str | float | None = None,
        ramp: str | float | timedelta | None = None,
        spread: str | float | timedelta | None = None,
        task: str | None = None,
        reason: str | None = None,
        outcome: str | None = None,
        origin: str | None = None,
        error: str | None = None,
        older: str | float | timedelta | None = None,
        newer: str | float | timedelta | None = None,
        ids: Iterable[str] | None = None,
        limit: int | None = None,
        max_replays: int = 3,
        probe: str | Probe | None = None,
        expired: Expired = "leave",
        include_unknown: bool = False,
        delete: bool = False,
        dump: str | Path | None = None,
        restore: str | Path | None = None,
        journal: str | Path | None = None,
        force: bool = False,
    ) -> None:
        values = {
            "rate": parse_rate(rate),
            "ramp": parse_duration(ramp, "ramp") or 0.0,
            "spread": parse_duration(spread, "spread") or 0.0,
            "selection": Selection(
                task=task,
                reason=reason,
                outcome=outcome,
                origin=origin,
                error=error,
                older=older,
                newer=newer,
                ids=ids,
            ),
            "limit": limit,
            "max_replays": max_replays,
            "probe": parse_probe(probe),
            "expired": expired,
            "include_unknown": include_unknown,
            "delete": delete,
            "dump": None if dump is None else Path(dump),
            "restore": None if restore is None else Path(restore),
            "journal": None if journal is None else Path(journal),
            "force": force,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def with_origin(self, origin: str) -> Settings:
        """Return the same with another origin selected."""
        found = copy(self)
        object.__setattr__(found, "selection", replace(self.selection, origin=origin))
        return found

    def _check(self) -> None:
        if self.ramp and self.rate is None:
            raise ValueError("ramp needs a rate: it goes from a tenth of it up to all of it")
        if self.spread > MAX_DELAY_SECONDS:
            raise ValueError(
                f"invalid spread {self.spread:g}: expected at most {MAX_DELAY_SECONDS} s,"
                " SQS's longest delay"
            )
        for name, least in (("limit", 1), ("max_replays", 1)):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < least
            ):
                raise ValueError(f"invalid {name} {value!r}: expected a whole number from {least}")
        if self.expired not in get_args(Expired):
            raise ValueError(
                f"invalid expired {self.expired!r}: expected one of {', '.join(get_args(Expired))}"
            )
        if self.restore is not None:
            for name in ("rate", "spread", "probe", "delete", "dump"):
                if getattr(self, name):
                    raise ValueError(
                        f"restore takes no {name}: it puts messages back on their dead-letter queue"
                    )
        if self.delete and self.dump is None:
            raise ValueError("delete needs an archive (dump): there is no undo")

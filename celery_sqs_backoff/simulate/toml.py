"""Reads a scenario from TOML. Every unknown key is refused, with the known ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ..provider.health import Thresholds
from ..provider.settings import Provider
from ..retry import policies
from ..units import parse_duration, parse_rate
from .scenario import Arrivals, Fleet, Kind, Phase, Scenario, ScenarioError, Script, Task

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["load", "scenario_from"]

T = TypeVar("T")

_DURATIONS = frozenset(
    {
        *("start", "lasts", "call_seconds", "failed_call_seconds", "retry_after", "retention"),
        *("retry_for", "horizon", "base", "cap", "probe_interval", "longest_probe_interval"),
        *("autoretry_backoff_max", "oldest"),
    }
)
_RATES = frozenset({"rate", "capacity"})
_WHOLE = frozenset(
    {
        *("backlog", "workers", "processes", "prefetch", "max_receive_count", "max_retries"),
        *("remember", "failures", "messages", "autoretry_max_retries", "crash_budget"),
    }
)


def load(path: Path, *, task: Task | None = None) -> Scenario:
    """Read a scenario from a file; see :func:`scenario_from`."""
    try:
        found = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as exc:
        raise ScenarioError(f"{path}: {exc}") from exc
    return scenario_from(found, name=path.stem, task=task)


def scenario_from(
    found: Mapping[str, Any], *, name: str = "outage", task: Task | None = None
) -> Scenario:
    """Build a scenario from parsed TOML.

    Args:
        found: the tables ``messages``, ``provider``, ``fleet``, ``queue`` and ``task``.
        name: if the scenario has none.
        task: the options where the table ``task`` is silent; ``None`` = the package's defaults.

    Raises:
        ScenarioError: a key is unknown, or a value is not what was expected.
    """
    tables = {"name", "horizon", "messages", "provider", "fleet", "queue", "task"}
    _refuse_unknown("scenario", found, tables)
    provider = _table("provider", found.get("provider", {}))
    entries = provider.pop("phases", [])
    if not isinstance(entries, list):
        raise ScenarioError(f"provider.phases={entries!r}: expected a list of tables")
    phases = tuple(_phase(entry) for entry in entries)
    queue = _table("queue", found.get("queue", {}))
    _refuse_unknown("queue", queue, {"max_receive_count", "retention"})
    values = {key: _value("queue", key, value) for key, value in queue.items()}
    if "horizon" in found:
        values["horizon"] = _value("scenario", "horizon", found["horizon"])
    return Scenario(
        name=str(found.get("name", name)),
        script=replace(_built("provider", Script, provider), phases=phases),
        arrivals=_built("messages", Arrivals, _table("messages", found.get("messages", {}))),
        fleet=_built("fleet", Fleet, _table("fleet", found.get("fleet", {}))),
        task=_task(_table("task", found.get("task", {})), task or Task()),
        **values,
    )


def _table(name: str, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise ScenarioError(f"{name}={found!r}: expected a table")
    return dict(found)


def _phase(entry: Any) -> Phase:
    values = _table("provider.phases", entry)
    kinds = ", ".join(repr(kind.value) for kind in Kind)
    try:
        kind = Kind(values.pop("kind", None))
    except ValueError:
        raise ScenarioError(f"provider.phases.kind: expected one of {kinds}") from None
    return _built("provider.phases", Phase, values, kind=kind)


def _task(values: dict[str, Any], task: Task) -> Task:
    gate = values.pop("provider", None)
    if gate is not None:
        task = replace(task, thresholds=_thresholds(**_table("task.provider", gate)))
    backoff = values.pop("backoff", None)
    if backoff is not None:
        task = replace(task, backoff=_policy(_table("task.backoff", backoff)))
    known = {field.name for field in fields(Task)} - {"backoff", "thresholds"}
    _refuse_unknown("task", values, known | {"backoff", "provider"})
    return replace(task, **{key: _value("task", key, value) for key, value in values.items()})


def _thresholds(**values: Any) -> Thresholds:
    _refuse_unknown("task.provider", values, {field.name for field in fields(Thresholds)})
    found = {key: _value("task.provider", key, value) for key, value in values.items()}
    try:
        return Provider("simulated", **found).thresholds
    except (TypeError, ValueError) as exc:
        raise ScenarioError(f"task.provider: {exc}") from exc


def _policy(values: dict[str, Any]) -> policies.Policy:
    names = ("FullJitter", "EqualJitter", "DecorrelatedJitter", "Exponential", "Schedule")
    name = values.pop("policy", "FullJitter")
    if name not in names:
        raise ScenarioError(f"task.backoff.policy={name!r}: expected one of {', '.join(names)}")
    arguments = {key: _value("task.backoff", key, value) for key, value in values.items()}
    try:
        policy: policies.Policy = getattr(policies, name)(**arguments)
    except (TypeError, ValueError) as exc:
        raise ScenarioError(f"task.backoff: {exc}") from exc
    return policy


def _built(table: str, make: Callable[..., T], values: Mapping[str, Any], **more: Any) -> T:
    known = {field.name for field in fields(make)} - {"phases", "kind"}  # type: ignore[arg-type]
    _refuse_unknown(table, values, known)
    required = [
        each.name
        for each in fields(make)  # type: ignore[arg-type]
        if each.default is MISSING and each.default_factory is MISSING and each.name in known
    ]
    if missing := [name for name in required if name not in values]:
        raise ScenarioError(f"{table}: expected {' and '.join(missing)}")
    return make(**{key: _value(table, key, value) for key, value in values.items()}, **more)


def _refuse_unknown(table: str, values: Mapping[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise ScenarioError(
                f"{table}: unknown key {key!r}, expected one of {', '.join(sorted(known))}"
            )


def _value(table: str, key: str, value: Any) -> Any:
    try:
        if key in _DURATIONS:
            return parse_duration(value, key)
        if key in _RATES:
            return value if value == 0 else parse_rate(value, key)
    except (TypeError, ValueError) as exc:
        raise ScenarioError(f"{table}: {exc}") from exc
    if isinstance(value, list) and table == "task.backoff":  # of a Schedule
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScenarioError(f"{table}.{key}={value!r}: expected a number")
    if key in _WHOLE and not isinstance(value, int):
        raise ScenarioError(f"{table}.{key}={value!r}: expected a whole number")
    return value

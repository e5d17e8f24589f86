"""Whose calls fail together? The tenant of a task's call, by a template of its arguments.

``"{account_id}"`` is an argument by its name, given by keyword or by position; ``"{0}"`` the first
positional one. Nothing else of a format string is allowed: values come from messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from string import Formatter
from typing import Any

__all__ = ["Template", "digest_of", "parameters_of"]

#: Longer values are told apart by this many of their characters.
_MOST_CHARACTERS = 500

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Template:
    """A parsed template.

    Args:
        text: such as ``"{account_id}"`` or ``"{0}-{region}"``.

    Raises:
        ValueError: it names no argument, or is more than names in braces and text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        expected = "expected arguments in braces, such as '{account_id}' or '{0}'"
        try:
            self._parts = list(Formatter().parse(text))
        except ValueError as exc:
            raise ValueError(f"invalid key {text!r}: {exc}; {expected}") from None
        self._names = [name for _, name, _, _ in self._parts if name is not None]
        plain = all(name.isdecimal() or name.isidentifier() for name in self._names)
        bare = all(not spec and not conversion for _, _, spec, conversion in self._parts)
        if not self._names or not plain or not bare:
            raise ValueError(f"invalid key {text!r}: {expected}")

    def check(self, function: Callable[..., object]) -> None:
        """Refuse names that no call of a function can give.

        Raises:
            ValueError: names the first of them.
        """
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a builtin that does not say
            return
        kinds = {each.kind for each in parameters}
        known = [each.name for each in parameters if each.kind not in _COLLECTING]
        places = sum(each.kind in _POSITIONAL for each in parameters)
        for name in self._names:
            if name.isdecimal():
                is_known = int(name) < places or inspect.Parameter.VAR_POSITIONAL in kinds
            else:
                is_known = name in known or inspect.Parameter.VAR_KEYWORD in kinds
            if not is_known:
                raise ValueError(
                    f"invalid key {self.text!r}: the task has no argument {name!r};"
                    f" expected one of {', '.join(known) or 'its arguments, but it has none'}"
                )

    def tenant(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> str | None:
        """Return the tenant of a call; ``None`` if an argument is missing.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            defaults: the task's parameters in order, with their defaults (``inspect.Parameter
                .empty`` = none).
        """
        names = list(defaults)
        values = []
        for literal, name, _, _ in self._parts:
            values.append(literal)
            if name is None:
                continue
            if name.isdecimal():
                place: int | None = int(name)
            else:
                place = names.index(name) if name in names else None
            if name in kwargs:
                value = kwargs[name]
            elif place is not None and place < len(args):
                value = args[place]
            else:
                value = defaults.get(name, inspect.Parameter.empty)
                if value is inspect.Parameter.empty:
                    return None
            values.append(str(value)[:_MOST_CHARACTERS])
        return "\0".join(values)


def parameters_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return a function's parameters that can be given by position, with their defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say
        return {}
    return {each.name: each.default for each in parameters if each.kind in _POSITIONAL}


def digest_of(tenant: str) -> str:
    """Return what stands for a tenant in logs and events: arguments of tasks do not."""
    return sha256(tenant.encode(errors="surrogatepass")).hexdigest()[:8]

"""What belongs together: the record of a scope lists its steps, and says whether it is over.

::

    open --compensate--> closing --undo tasks sent--> closed

It never opens again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.utils.json import dumps, loads

from .store import KEEP_SECONDS, key_of, settle
from .vault import Vault

__all__ = ["CLOSED", "CLOSING", "OPEN", "Scope", "scope_key"]

OPEN, CLOSING, CLOSED = "open", "closing", "closed"

_EMPTY: dict[str, Any] = {"state": OPEN, "steps": []}


class Scope:
    """The record of one scope: ``state``, the names of its ``steps``, and more."""

    def __init__(self, vault: Vault, name: str) -> None:
        self._vault = vault
        self._at = scope_key(name)

    def read(self) -> dict[str, Any]:
        return _read(self._vault.get(self._at))

    def change(self, **changes: Any) -> dict[str, Any]:
        """Write fields; return the record that is there now: see :meth:`update`."""
        return self.update(lambda scope: changes)

    def update(self, changes: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Write changes, whatever others write meanwhile; return the record that is there now.

        Of a scope that is not open any more, nothing but its closing is written.

        Arguments:
            changes: returns the fields to write, given the record as it is now; asked again when
                somebody else was quicker.
        """
        while True:
            text = self._vault.get(self._at)
            scope = _read(text)
            fields = changes(scope)
            new = scope | fields
            is_over = scope["state"] != OPEN and fields.get("state") != CLOSED
            if is_over or new == scope:
                return scope
            if text is None:
                if self._vault.add(self._at, dumps(new), KEEP_SECONDS) in (None, dumps(new)):
                    return new
            elif settle(self._vault, self._at, text, dumps(new), KEEP_SECONDS):
                return new


def _read(text: str | None) -> dict[str, Any]:
    scope: dict[str, Any] = dict(_EMPTY) if text is None else loads(text)
    return scope


def scope_key(scope: str) -> str:
    """Return the key of a scope's record."""
    return key_of("scope", scope)

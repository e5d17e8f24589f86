"""What belongs together: the record of a scope lists its steps, and says whether it is over.

::

    open --compensate--> closing --undo tasks sent--> closed

It never opens again.

Of a workflow it also names the message that works on it (``owner``), the ``run`` by which that has
entered, and all messages that have entered since it ended and come back, or are given up
(``working``). A call as a function, which nobody gives up, is not among these: it owns the workflow
only while there is no message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.utils.json import dumps, loads

from ..store.protocol import KEEP_SECONDS, key_of
from ..store.vault import Vault
from .writes import settle

__all__ = [
    "CLOSED",
    "CLOSING",
    "OPEN",
    "Scope",
    "forsaken",
    "handed_back",
    "left",
    "note_scope",
    "others",
    "owner_of",
    "scope_key",
    "scopes_of",
]

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


# Who works on a workflow. ``mine``: all that records may call a message.


def owner_of(scope: dict[str, Any]) -> str | None:
    """Who takes the workflow back when given up: a message, if one works on it.

    A call as a function has entered after that message, and may have been killed there.
    """
    owner, working = scope.get("owner"), scope.get("working")
    return working[-1] if working and owner not in working else owner


def others(scope: dict[str, Any], mine: tuple[str, ...]) -> list[str]:
    """The other messages that have entered since the workflow ended, and go on with it."""
    return [each for each in scope.get("working", ()) if each not in mine]


def left(scope: dict[str, Any], mine: tuple[str, ...]) -> dict[str, Any]:
    """What to note of a message that does not go on with the workflow."""
    rest = others(scope, mine)
    return {} if rest == scope.get("working", []) else {"working": rest}


def handed_back(scope: dict[str, Any], mine: tuple[str, ...]) -> dict[str, Any]:
    """What to note of one that owns it, perhaps, and does not go on: the last other owns it."""
    rest = others(scope, mine)
    if scope.get("forsaken") and owner_of(scope) in mine and not rest:
        return {}  # it is to take it back
    if scope.get("owner") in mine and not scope.get("ended") and rest:
        # This one's lock is not that one's, which had ended before.
        return {"owner": rest[-1], "working": rest, "lock": ""}
    return left(scope, mine)


def forsaken(scope: dict[str, Any], mine: tuple[str, ...]) -> dict[str, Any]:
    """What to note of one that is given up while another message owns the workflow."""
    has_ended = bool(scope.get("ended"))
    if owner_of(scope) in mine and not has_ended:
        return {}
    noted = left(scope, mine)
    return noted and noted | {"forsaken": not has_ended}


# Which scopes a message works on, for whoever gives it up


def scopes_of(vault: Vault, mine: tuple[str, ...]) -> list[str]:
    """Return the names of the scopes that a message has entered."""
    texts = (vault.get(_listed_at(message)) for message in mine)
    listed = (scope for text in texts if text is not None for scope in loads(vault.reveal(text)))
    return list(dict.fromkeys(listed))


def note_scope(vault: Vault, message: str, scope: str) -> None:
    """List the scope as one that the message works on."""
    # By its name, by which all of its records are found, and which may be private: hidden.
    at, first = _listed_at(message), vault.hide(dumps([scope]))
    there = vault.add(at, first, KEEP_SECONDS)
    while there is not None:
        listed = loads(vault.reveal(there))
        listed += [scope] if scope not in listed else []
        new = vault.hide(dumps(listed))
        if settle(vault, at, there, new, KEEP_SECONDS):  # kept anew in either case
            return
        there = vault.add(at, first, KEEP_SECONDS)


def _listed_at(message: str) -> str:
    return key_of("scopes-of", message)

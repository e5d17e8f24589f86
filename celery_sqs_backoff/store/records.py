"""Records of JSON above a signed store, encrypted as a whole if the project has a cipher.

A record is replaced or deleted only if it still has the text that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kombu.utils.json import dumps, loads

from .errors import RecordRejected, StoreUnavailable
from .protocol import KEEP_SECONDS, key_of
from .vault import Vault

_ENCRYPTED = "e1:"

#: Others write the record at the same time: how often to try again.
_TRIES = 10

Change = Callable[[dict[str, Any]], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Record:
    """A record after a read or a write. ``is_new``: this call has created it."""

    key: str
    text: str
    fields: dict[str, Any]
    is_new: bool = False


class Records:
    """The project's records, by kind and name.

    Arguments:
        cipher: a ``cryptography.fernet.Fernet``, or anything with its ``encrypt`` and ``decrypt``.

    Raises:
        RecordRejected: (its methods) this project did not write the record, or cannot decrypt it.
        StoreUnavailable: (its methods) the store did not answer.
    """

    def __init__(self, vault: Vault, *, cipher: Any = None) -> None:
        self.vault = vault
        self.digest = vault.digest
        self._cipher = cipher

    def get(self, kind: str, name: str) -> Record | None:
        return self._read(key_of(kind, name))

    def reread(self, record: Record) -> Record | None:
        return self._read(record.key)

    def add(self, kind: str, name: str, fields: dict[str, Any], ttl: float) -> Record:
        """Create the record, or return the one that is there."""
        key, text = key_of(kind, name), self._seal(fields)
        there = self.vault.add(key, text, ttl)
        if there is None or there == text:  # a client library may send a call twice
            return Record(key, text, fields, is_new=True)
        return Record(key, there, self._open(there))

    def replace(
        self, old: Record, fields: dict[str, Any], ttl: float | None = KEEP_SECONDS
    ) -> Record | None:
        """Return the new record, or ``None`` if it has changed since it was read.

        If the store says so, look a second time, because a client library may send a call twice.
        """
        text = self._seal(fields)
        is_done = self.vault.replace(old.key, old.text, text, ttl) or (
            self.vault.get(old.key) == text
        )
        return Record(old.key, text, fields) if is_done else None

    def update(
        self,
        kind: str,
        name: str,
        new: dict[str, Any],
        ttl: float,
        change: Change,
        *,
        keeps_end: bool = False,
    ) -> Record:
        """Create the record, or write the fields that ``change`` returns for the old ones.

        Arguments:
            change: may return ``None`` to write no change.
            keeps_end: whether a changed record keeps its end.

        Raises:
            StoreUnavailable: other runs were faster each time.
        """
        for _ in range(_TRIES):
            there = self.add(kind, name, new, ttl)
            changed = None if there.is_new else change(there.fields)
            if changed is None:
                return there
            fields = there.fields | dict(changed)
            written = self.replace(there, fields, None if keeps_end else ttl)
            if written is not None:
                return written
        raise StoreUnavailable("gave up after 10 conflicting writes by other runs")

    def delete(self, record: Record) -> bool:
        return self.vault.delete(record.key, record.text)

    def _read(self, key: str) -> Record | None:
        text = self.vault.get(key)
        return None if text is None else Record(key, text, self._open(text))

    def _seal(self, fields: dict[str, Any]) -> str:
        text: str = dumps(fields)
        if self._cipher is None:
            return text
        token: str = self._cipher.encrypt(text.encode()).decode()
        return _ENCRYPTED + token

    def _open(self, text: str) -> dict[str, Any]:
        try:
            if text.startswith(_ENCRYPTED):  # without a cipher this fails too
                token = text.removeprefix(_ENCRYPTED).encode()
                text = self._cipher.decrypt(token).decode()
            fields = loads(text)
            if not isinstance(fields, dict):
                raise TypeError("no fields")
        except Exception as exc:  # whatever the cipher or JSON raises
            raise RecordRejected(
                "a record cannot be read: somebody else has written it, or sqs_backoff['encrypt']"
                " was changed without keeping the old key (MultiFernet keeps both)"
            ) from exc
        return fields

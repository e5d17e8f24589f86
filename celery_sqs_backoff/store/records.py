"""Records of JSON above a signed store, encrypted as a whole if the project has a cipher.

A record is replaced or deleted only if its text is still the one that was read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kombu.utils.json import dumps, loads

from .errors import RecordRejected
from .protocol import KEEP_SECONDS, key_of
from .vault import Vault

_ENCRYPTED = "e1:"


class Cipher(Protocol):
    """What ``sqs_backoff["encrypt"]`` is: ``cryptography.fernet.Fernet``, or anything like it."""

    def encrypt(self, data: bytes) -> bytes:
        """Return the token for ``data``."""

    def decrypt(self, token: bytes) -> bytes:
        """Return the data of a token."""


@dataclass(frozen=True)
class Record:
    """A record as it was read or written. ``is_new``: this call has created it."""

    key: str
    text: str
    fields: dict[str, Any]
    is_new: bool = False


class Records:
    """The project's records, by kind and name.

    Raises:
        RecordRejected: (its methods) this project did not write the record, or cannot decrypt it.
        StoreUnavailable: (its methods) the store did not answer.
    """

    def __init__(self, vault: Vault, *, cipher: Cipher | None = None) -> None:
        self.vault = vault
        self.digest = vault.digest
        self._cipher = cipher

    def get(self, kind: str, name: str) -> Record | None:
        return self._read(key_of(kind, name))

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

        If the store says that it has, look once more: a client library may send a call twice.
        """
        text = self._seal(fields)
        is_done = self.vault.replace(old.key, old.text, text, ttl) or (
            self.vault.get(old.key) == text
        )
        return Record(old.key, text, fields) if is_done else None

    def reread(self, record: Record) -> Record | None:
        return self._read(record.key)

    def delete(self, record: Record) -> bool:
        return self.vault.delete(record.key, record.text)

    def _read(self, key: str) -> Record | None:
        text = self.vault.get(key)
        return None if text is None else Record(key, text, self._open(text))

    def _seal(self, fields: dict[str, Any]) -> str:
        text: str = dumps(fields)
        if self._cipher is None:
            return text
        return _ENCRYPTED + self._cipher.encrypt(text.encode()).decode()

    def _open(self, text: str) -> dict[str, Any]:
        try:
            if text.startswith(_ENCRYPTED):
                if self._cipher is None:
                    raise ValueError("no cipher")
                token = text.removeprefix(_ENCRYPTED).encode()
                text = self._cipher.decrypt(token).decode()
            fields = loads(text)
            if not isinstance(fields, dict):
                raise TypeError("no fields")
        except Exception as exc:  # whatever the cipher or JSON raises
            raise RecordRejected(
                "A record in the store cannot be read: somebody else has written it, or"
                " sqs_backoff['encrypt'] was changed without keeping the old key (MultiFernet keeps"
                " both)"
            ) from exc
        return fields

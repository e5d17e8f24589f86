"""Read and write the records of one project, as JSON, in a store that other projects may share.

A key in the store has a hash of the project's namespace and the record's name. So projects with
different namespaces have different keys. Values are encrypted if the project has a cipher. If the
project has a secret, each value is signed together with its key. So a record is rejected if another
project wrote it, or if it was moved to another key. A record is replaced or deleted only if it is
unchanged since it was read.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from kombu.utils.json import dumps, loads

from .errors import RecordRejected, StoreUnavailable
from .protocol import KEEP_SECONDS, Store

_ENCRYPTED = "e1:"

#: How often ``update`` tries when other runs write the same record at the same time.
_TRIES = 10

Change = Callable[[dict[str, Any]], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Record:
    """A record after a read or a write.

    ``raw`` is its text in the store. ``is_new``: whether the call that returned it has created it.
    """

    key: str
    raw: str
    fields: dict[str, Any]
    is_new: bool = False


class Records:
    """The project's records, by kind and name.

    Arguments:
        store: the store that keeps the records.
        namespace: name that distinguishes this project from others on the same store.
        secrets: keys for HMAC-SHA256. The first signs and all of them verify, so that a secret can
            be changed. An empty list = records are not signed.
        cipher: a ``cryptography.fernet.Fernet``, or an object with the same ``encrypt`` and
            ``decrypt``. ``None`` = records are not encrypted.

    Raises:
        RecordRejected: (its methods) this project did not write the record, or cannot decrypt it.
        StoreUnavailable: (its methods) the store did not answer.
    """

    def __init__(
        self,
        store: Store,
        *,
        namespace: str = "",
        secrets: Sequence[str | bytes] = (),
        cipher: Any = None,
    ) -> None:
        self.store, self._namespace, self._cipher = store, namespace, cipher
        self._secrets = [s if isinstance(s, bytes) else s.encode() for s in secrets]

    def get(self, kind: str, name: str) -> Record | None:
        return self._read(self.key(kind, name))

    def reread(self, record: Record) -> Record | None:
        return self._read(record.key)

    def add(self, kind: str, name: str, fields: dict[str, Any], ttl: float) -> Record:
        """Create the record, or return the existing record."""
        key = self.key(kind, name)
        raw = self._seal(key, fields)
        there = self.store.add(key, raw, ttl)
        if there is None or there == raw:  # equal if a client library has sent the call twice
            return Record(key, raw, fields, is_new=True)
        return self._open(key, there)

    def replace(
        self, old: Record, fields: dict[str, Any], ttl: float | None = KEEP_SECONDS
    ) -> Record | None:
        """Replace a record, and return the new one, or ``None`` if the record has changed.

        If the store says that the record has changed, this method reads the record again. If a
        client library has sent the call twice, the change may be this method's own.

        Arguments:
            old: the record that the caller has read.
            fields: the new fields.
            ttl: seconds from now until the record ends; ``None`` keeps its end. Default 30 days.
        """
        raw = self._seal(old.key, fields)
        is_done = self.store.replace(old.key, old.raw, raw, ttl) or self.store.get(old.key) == raw
        return Record(old.key, raw, fields) if is_done else None

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
        """Create the record, or change the existing one.

        Arguments:
            new: the fields of a new record.
            ttl: seconds until the record ends.
            change: gets all old fields. It returns the fields to change, or ``None`` to leave the
                record unchanged. It may be called again if another run writes at the same time.
            keeps_end: whether the end of an existing record stays the same. Default: the record
                then ends ``ttl`` seconds from now.

        Raises:
            StoreUnavailable: other runs wrote the record first at each of ten tries.
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
        return self.store.delete(record.key, record.raw)

    def discard(self, key: str) -> bool:
        """Delete a record without checking its signature, and return whether there was one."""
        there = self.store.get(key)
        return there is not None and self.store.delete(key, there)

    def key(self, kind: str, name: str) -> str:
        """Return the key of a record in the store, made of its kind and a hash."""
        return f"{kind}:{self._hash(name)}"

    def digest(self, *parts: str) -> str:
        """Return a digest of a task ID or an input, which hides it from readers of the store."""
        return self._hash(*parts)[:32]

    def _hash(self, *parts: str) -> str:
        # JSON makes ("a:b", "c") and ("a", "b:c") differ, and can encode half a surrogate pair.
        return sha256(json.dumps([self._namespace, *parts]).encode()).hexdigest()

    def _read(self, key: str) -> Record | None:
        raw = self.store.get(key)
        return None if raw is None else self._open(key, raw)

    def _seal(self, key: str, fields: dict[str, Any]) -> str:
        text: str = dumps(fields)
        if self._cipher is not None:
            text = _ENCRYPTED + self._cipher.encrypt(text.encode()).decode()
        return self._signed(key, text)[0]

    def _signed(self, key: str, text: str) -> list[str]:
        """Return one signed text for each secret, with the signature in front.

        Records are written with the first text. The others serve to check older records.
        """
        if not self._secrets:
            return [f"s0::{text}"]
        message = f"{key} {text}".encode()  # unambiguous, because a key has no space
        return [f"s1:{hmac.new(s, message, sha256).hexdigest()}:{text}" for s in self._secrets]

    def _open(self, key: str, raw: str) -> Record:
        text = "".join(raw.split(":", 2)[2:])
        signed = self._signed(key, text)
        if not any(hmac.compare_digest(raw.encode(), each.encode()) for each in signed):
            raise RecordRejected(
                "a record is not signed by this project: another project has written it, or the old"
                " secret was removed from sqs_backoff['secret'] too early"
            )
        try:
            if text.startswith(_ENCRYPTED):  # without a cipher, the next lines raise
                token = text.removeprefix(_ENCRYPTED).encode()
                text = self._cipher.decrypt(token).decode()
            fields = loads(text)
            if not isinstance(fields, dict):
                raise TypeError("no fields")
        except Exception as exc:  # the cipher or JSON may raise any exception
            raise RecordRejected(
                "a record cannot be read: another project has written it, or sqs_backoff['encrypt']"
                " was changed without keeping the old key (MultiFernet keeps both)"
            ) from exc
        return Record(key, raw, fields)

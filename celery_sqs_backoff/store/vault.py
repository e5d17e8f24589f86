"""Records of one project in a store that others may read, share or write.

Keys carry the project's namespace and are hashed, so another environment on the same store or a
database's collation cannot mix them up. Values are signed together with their key: a record that
this project did not write, or that was moved to another key, is rejected.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from .errors import RecordRejected
from .protocol import Store


class Vault:
    """A :class:`Store` over another one that signs records and keeps projects apart.

    Arguments:
        store: where the records are.
        namespace: what sets this project apart from all others on the same store.
        secrets: keys for HMAC-SHA256. The first signs, all of them verify, so a secret can be
            changed. None = records are not signed.

    Raises:
        RecordRejected: (its methods) the record is not signed with one of the secrets.
    """

    def __init__(
        self, store: Store, *, namespace: str = "", secrets: Sequence[str | bytes] = ()
    ) -> None:
        self.store, self._namespace = store, namespace
        self._secrets = [s if isinstance(s, bytes) else s.encode() for s in secrets]

    def add(self, key: str, value: str, ttl: float) -> str | None:
        at = self.key_in_store(key)
        there = self.store.add(at, self._seals(at, value)[0], ttl)
        return None if there is None else self._opened(at, there)

    def get(self, key: str) -> str | None:
        at = self.key_in_store(key)
        there = self.store.get(at)
        return None if there is None else self._opened(at, there)

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        at = self.key_in_store(key)
        sealed = self._seals(at, new)[0]
        return any(self.store.replace(at, was, sealed, ttl) for was in self._seals(at, old))

    def delete(self, key: str, old: str) -> bool:
        at = self.key_in_store(key)
        return any(self.store.delete(at, was) for was in self._seals(at, old))

    def discard(self, key: str) -> bool:
        """Delete a record that anybody may have written, and return whether there was one."""
        at = self.key_in_store(key)
        there = self.store.get(at)
        return there is not None and self.store.delete(at, there)

    def digest(self, *parts: str) -> str:
        """Return a digest of a task ID or an input, which hides it from readers of the store."""
        # A task ID may be any text that JSON can hold: half a surrogate pair too.
        text = _joined(self._namespace, *parts).encode(errors="surrogatepass")
        return sha256(text).hexdigest()[:32]

    def key_in_store(self, key: str) -> str:
        """Return the key of a record as the store knows it."""
        digest = sha256(_joined(self._namespace, key).encode()).hexdigest()
        return f"{key.partition(':')[0]}:{digest}"

    def _seals(self, at: str, value: str) -> list[str]:
        """Return the value behind each possible signature. The first is the one to write."""
        if not self._secrets:
            return [f"s0::{value}"]
        text = _joined(at, value).encode()
        return [f"s1:{hmac.new(s, text, sha256).hexdigest()}:{value}" for s in self._secrets]

    def _opened(self, at: str, sealed: str) -> str:
        value = "".join(sealed.split(":", 2)[2:])
        for seal in self._seals(at, value):
            if hmac.compare_digest(sealed.encode(), seal.encode()):
                return value
        raise RecordRejected(
            "a record is not signed by this project: somebody else has written it, or the old"
            " secret was dropped from sqs_backoff['secret'] too early"
        )


def _joined(*parts: str) -> str:
    return "".join(f"{len(part)}:{part}" for part in parts)

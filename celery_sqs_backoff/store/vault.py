"""Records of one project in a store that others may read, share or write.

Keys carry the project's namespace and are hashed, so neither another environment on the same store
nor a database's collation can mix them up. Values are signed together with their key: a record that
this project did not write, or that was moved to another key, is rejected.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
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
        self,
        store: Store,
        *,
        namespace: str = "",
        secrets: Sequence[str | bytes] = (),
    ) -> None:
        self.store = store
        self._namespace = namespace
        self._secrets = [s if isinstance(s, bytes) else s.encode() for s in secrets]

    def add(self, key: str, value: str, ttl: float) -> str | None:
        at = self._at(key)
        there = self.store.add(at, self._sealed(at, value), ttl)
        return None if there is None else self._opened(at, there)

    def get(self, key: str) -> str | None:
        at = self._at(key)
        there = self.store.get(at)
        return None if there is None else self._opened(at, there)

    def replace(self, key: str, old: str, new: str, ttl: float | None) -> bool:
        at = self._at(key)
        sealed = self._sealed(at, new)
        return self._any(at, old, lambda was: self.store.replace(at, was, sealed, ttl))

    def delete(self, key: str, old: str) -> bool:
        at = self._at(key)
        return self._any(at, old, lambda was: self.store.delete(at, was))

    def key_in_store(self, key: str) -> str:
        """Return the key of a record as the store knows it."""
        return self._at(key)

    def discard(self, key: str) -> bool:
        """Delete a record that anybody may have written, and return whether there was one."""
        at = self._at(key)
        there = self.store.get(at)
        return there is not None and self.store.delete(at, there)

    def digest(self, *parts: str) -> str:
        """Return a digest of a task ID or an input, which hides it from readers of the store."""
        # A task ID may be any text that JSON can hold: half a surrogate pair too.
        text = _joined(self._namespace, *parts).encode(errors="surrogatepass")
        return sha256(text).hexdigest()[:32]

    def _at(self, key: str) -> str:
        digest = sha256(_joined(self._namespace, key).encode()).hexdigest()
        return f"{key.partition(':')[0]}:{digest}"

    def _sealed(self, at: str, value: str, secret: bytes | None = None) -> str:
        """Put the signature before the value, as ``s1:<hex>:<value>``, or ``s0::`` for none."""
        if secret is None:
            if not self._secrets:
                return f"s0::{value}"
            secret = self._secrets[0]
        signature = hmac.new(secret, _joined(at, value).encode(), sha256).hexdigest()
        return f"s1:{signature}:{value}"

    def _opened(self, at: str, sealed: str) -> str:
        _, _, rest = sealed.partition(":")
        _, _, value = rest.partition(":")
        for candidate in self._all_sealed(at, value):
            if hmac.compare_digest(sealed.encode(), candidate.encode()):
                return value
        raise RecordRejected(
            "A record in the store is not signed by this project: somebody else has written it, or"
            " sqs_backoff['secret'] was changed without keeping the old one in the list"
        )

    def _all_sealed(self, at: str, value: str) -> list[str]:
        if not self._secrets:
            return [self._sealed(at, value)]
        return [self._sealed(at, value, secret) for secret in self._secrets]

    def _any(self, at: str, old: str, change: Callable[[str], bool]) -> bool:
        """Return whether a change was made for one of the possible signatures of ``old``."""
        return any(change(was) for was in self._all_sealed(at, old))


def _joined(*parts: str) -> str:
    return "".join(f"{len(part)}:{part}" for part in parts)

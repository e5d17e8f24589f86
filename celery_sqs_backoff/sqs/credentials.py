"""Credentials that a thread of their own renews, not the calls that need them.

botocore renews them in the thread that happens to make a call, and lets all other threads wait
(https://github.com/boto/botocore/pull/790). STS may hang for minutes, and on those threads the
holds of all messages of a queue may depend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, TypeVar

from botocore.credentials import RefreshableCredentials
from botocore.exceptions import ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as NotConnected

from ..threads import SharedCall
from .errors import CredentialsNotRenewed, code_of
from .handshakes import handshakes

_Result = TypeVar("_Result")

#: A token is renewed in the background when the first share of its lifetime is left. A call waits
#: for the renewal when the second is left. botocore's limits are 15 and 10 minutes, so each call
#: would renew a token of 900 s (https://github.com/boto/botocore/issues/2189).
_RENEW_EARLY_SHARE = 1 / 3
_RENEW_NOW_SHARE = 1 / 9

#: A call waits for a renewal until it is this old, with a valid old token and without. The first
#: call also makes botocore's clients, which takes a busy small machine more than ten seconds.
_WITH_GOOD_SECONDS = 1.0
_WITHOUT_SECONDS = 30.0


def renew_beside(credentials: Any) -> None:
    """Renew credentials in a thread of their own. Several clients may share them."""
    if isinstance(credentials, RefreshableCredentials) and "get_frozen_credentials" not in vars(
        credentials
    ):
        renewal = _Renewal(credentials)
        credentials.get_frozen_credentials = renewal.get_frozen_credentials  # type: ignore[method-assign]


def wait_for_credentials(fetch: SharedCall[_Result], method: str = "broker") -> _Result:
    """Return the result of a fetch once it is there. Start the fetch if it does not run.

    Args:
        fetch: the call that fetches them, or that makes clients with them.
        method: botocore's name of their source.

    Raises:
        CredentialsNotRenewed: the fetch took 30 seconds, and goes on; or the source was not
            reached, or refuses. Any other exception of ``fetch`` is raised, too.
    """
    try:
        return fetch.result(seconds=_WITHOUT_SECONDS)
    except SharedCall.TakesTooLong:
        raise _not_renewed(method, "no answer") from None
    except (ClientError, NotConnected, HTTPClientError) as exc:  # of STS, not of SQS
        raise _not_renewed(method, code_of(exc)) from exc


def _not_renewed(method: str, error_msg: str) -> CredentialsNotRenewed:
    return CredentialsNotRenewed(provider=method, error_msg=error_msg)


class _Renewal:
    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials
        self._renew: Callable[[], Any] = credentials.get_frozen_credentials
        self._renewal: SharedCall[Any] = SharedCall(self._run)

    def get_frozen_credentials(self) -> Any:
        credentials = self._credentials
        good = self._good()
        if good is not None and not credentials.refresh_needed():
            return good
        if good is not None:
            # botocore has logged its exception. A call that needs newer credentials raises it, too.
            with suppress(Exception):
                self._renewal.result(seconds=_WITH_GOOD_SECONDS)
            return self._good() or good
        wait_for_credentials(self._renewal, credentials.method)
        if (good := self._good()) is None:  # botocore logs no error then
            raise _not_renewed(credentials.method, "expired meanwhile")
        return good

    def _good(self) -> Any:
        """Return the credentials, or ``None`` if they have expired."""
        return None if self._credentials._is_expired() else self._credentials._frozen_credentials

    def _run(self) -> Any:
        with handshakes.one():
            return self._renew()


def role_credentials(fetch: Callable[[], Mapping[str, Any]]) -> RefreshableCredentials:
    """Make credentials that fetch a role's token now, and each further one in time."""

    def refresh() -> dict[str, str]:
        token = fetch()
        return {
            "access_key": str(token["AccessKeyId"]),
            "secret_key": str(token["SecretAccessKey"]),
            "token": str(token["SessionToken"]),
            "expiry_time": token["Expiration"].isoformat(),
        }

    metadata = refresh()
    expires = datetime.fromisoformat(metadata["expiry_time"])
    lifetime = max(0.0, (expires - datetime.now(timezone.utc)).total_seconds())
    return RefreshableCredentials.create_from_metadata(
        metadata,
        refresh_using=refresh,
        method="sts-assume-role",
        advisory_timeout=int(lifetime * _RENEW_EARLY_SHARE),
        mandatory_timeout=int(lifetime * _RENEW_NOW_SHARE),
    )

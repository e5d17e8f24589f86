"""Makes the boto clients of a worker or a command, two for each set of credentials and Region.

The polling client receives messages, and the settling client makes all other calls. The two share
no connections. Otherwise long polls, which take up to 20 s each, would hold the connections that
other calls need. By default a call is tried once, because the caller decides whether to retry.

A separate thread renews the credentials. botocore would renew them in the thread that happens to
make a call, while all other threads wait (https://github.com/boto/botocore/pull/790). STS may hang
for minutes, and in that time the worker could not extend any visibility timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import ClientError, HTTPClientError, ReadTimeoutError
from botocore.exceptions import ConnectionError as NotConnected
from botocore.session import Session, get_session

from ..threads import SharedCall, call_in_time
from .calls import Calls
from .errors import CredentialsNotRenewed, code_of
from .handshakes import announce_handshakes, handshakes
from .limits import MAX_WAIT_TIME_SECONDS

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

#: By default botocore waits 60 s for a response and tries five times. That is too long, because the
#: worker makes at most two calls of one action on a queue at a time, and the next calls must wait
#: until these two end.
_SETTLING = Config(
    connect_timeout=5,
    read_timeout=10,
    retries={"total_max_attempts": 1},
    tcp_keepalive=True,
    max_pool_connections=50,
)

#: Each queue has up to three long polls under way, and a worker may have many queues. urllib3 opens
#: connections only on demand, so a high ``max_pool_connections`` costs nothing. After a call,
#: urllib3 closes the connections above this number.
_POLLING = Config(
    connect_timeout=5,
    read_timeout=MAX_WAIT_TIME_SECONDS + 10,
    retries={"total_max_attempts": 1},
    tcp_keepalive=True,
    max_pool_connections=1_000,
    parameter_validation=False,
)

#: The longest time that a call may take. botocore's own timeouts are no limit for a call, because
#: they start again at each byte
#: (https://urllib3.readthedocs.io/en/stable/reference/urllib3.util.html) and do not cover the DNS
#: lookup. A request gets one more second for each 50,000 bytes of its body.
_SETTLING_SECONDS = 15.0
_POLLING_SECONDS = MAX_WAIT_TIME_SECONDS + 35.0
_SLOWEST_BYTES_PER_SECOND = 50_000

#: Clients younger than this are not replaced, even if SQS refuses their credentials. So if several
#: calls fail with the old credentials, the clients are replaced only once.
_REBUILD_SECONDS = 5.0

#: Default lifetime of a role's token, as in kombu (``sts_token_timeout``).
_TOKEN_SECONDS = 900

#: When at most a third of a token's lifetime is left, a call makes a separate thread renew the
#: token. botocore itself renews when 15 minutes are left, so each call would renew a token of 900 s
#: (https://github.com/boto/botocore/issues/2189).
_RENEW_EARLY_SHARE = 1 / 3

#: The first number is how long a call waits for a renewal while the old token is valid. The second
#: is how long a call waits when no token is valid. The first call of all also waits until the
#: clients are made, which takes more than ten seconds on a small and busy machine.
_WITH_GOOD_SECONDS = 1.0
_WITHOUT_SECONDS = 30.0

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Pair:
    """The two clients for one set of credentials in one Region."""

    polling: SQSClient
    settling: SQSClient
    made_at: float


class _Account:
    """One set of credentials in one Region, with its clients.

    Attributes:
        making: the call that makes the clients. All threads that need them share one call.
        pair: the clients; ``None`` before they are made, and after SQS has refused them.
    """

    pair: _Pair | None = None

    def __init__(self, make: Callable[[_Account], _Pair]) -> None:
        self.making: SharedCall[_Pair] = SharedCall(partial(make, self))


class Clients:
    """The clients for a worker's queues, with credentials, Region and endpoint of kombu's client.

    The clients are kept when Celery reconnects. The credentials come from kombu's own client, so a
    subclass of kombu's channel may override ``new_sqs_client``. With ``sts_role_arn`` (in the
    transport options, or on a predefined queue) the credentials are renewed before they expire. If
    the token of a role cannot be fetched, only calls on the queues of that role wait, each for 30
    seconds at most. Safe to use from any thread.

    Arguments:
        attempts: how often a call other than a receive is tried. Default 1.
    """

    def __init__(self, *, attempts: int = 1) -> None:
        self._config = _SETTLING.merge(Config(retries={"total_max_attempts": attempts}))
        self._lock = threading.RLock()
        self._channel: Any = None
        self._accounts: dict[tuple[Any, ...], _Account] = {}
        self._account_of: dict[str, _Account] = {}
        self._settling: dict[str, Calls] = {}

    def attach(self, channel: Any) -> None:
        """Take credentials and settings from this channel of kombu."""
        self._channel = channel

    def settling(self, url: str) -> Calls:
        """Return the object for all calls on a queue except ReceiveMessage."""
        calls = self._settling.get(url)
        if calls is None:
            calls = self._settling[url] = Calls(
                lambda: self._pair(url).settling, url, refresh=lambda: self.refresh(url)
            )
        return calls

    def polling(self, url: str) -> Calls:
        """Return the object for ReceiveMessage. Its timeouts allow a long poll of 20 seconds."""
        return Calls(lambda: self._pair(url).polling, url, refresh=lambda: self.refresh(url))

    def refresh(self, url: str) -> None:
        """Drop the queue's clients after SQS has refused their credentials. Never raises.

        The next call makes new clients. Clients younger than 5 seconds are kept.
        """
        with self._lock:
            account = self._account_of.get(url)
            pair = None if account is None else account.pair
            if account and pair and monotonic() - pair.made_at >= _REBUILD_SECONDS:
                account.pair = None

    def _pair(self, url: str) -> _Pair:
        with self._lock:
            account = self._account_of.get(url)
            if account is None:
                key = _key(self._channel, url)
                account = self._accounts.setdefault(key, _Account(partial(self._make, key)))
                self._account_of[url] = account
        # If there are no clients yet, or SQS refused their credentials, wait for new clients. STS
        # may have to answer first.
        return account.pair or _wait_for_credentials(account.making)

    def _make(self, key: tuple[Any, ...], account: _Account) -> _Pair:
        if (pair := account.pair) is not None:
            return pair
        region, access_key, secret_key, role = key
        channel, credentials, token = self._channel, None, None
        with handshakes.one():
            if role is not None:
                seconds = channel.transport_options.get("sts_token_timeout", _TOKEN_SECONDS)
                # kombu itself renews the token of only one queue
                # (https://github.com/celery/kombu/pull/2224). botocore calls the lambda for each
                # renewal. The channel may be closed by then, but the method needs no open channel.
                credentials = _role_credentials(
                    lambda: channel.generate_sts_session_token(role, seconds)
                )
                access_key, secret_key, token = credentials.get_frozen_credentials()[:3]
            kombu_client = channel.new_sqs_client(region, access_key, secret_key, token)
            account.pair = pair = _Pair(
                polling=_copy(kombu_client, _POLLING, _POLLING_SECONDS, credentials),
                settling=_copy(kombu_client, self._config, _SETTLING_SECONDS, credentials),
                made_at=monotonic(),
            )
        return pair


def _copy(client: Any, config: Config, seconds: float, credentials: Any = None) -> SQSClient:
    """Copy kombu's client, with our own timeouts and number of attempts.

    The copy shares ``credentials``, or else the credentials of kombu's client.
    """
    credentials = credentials or client._request_signer._credentials  # kombu reads them here, too
    _renew_beside(credentials)
    with _SESSION_LOCK:
        session = _session()
        # Pass the object, not only its keys, so that the copy gets the renewed keys, too.
        session._credentials = credentials  # type: ignore[attr-defined]
        try:
            copy: Any = session.create_client(
                "sqs",
                region_name=client.meta.region_name,
                endpoint_url=client.meta.endpoint_url,
                verify=client._endpoint.http_session._verify,  # a user's channel may set a CA
                config=client.meta.config.merge(config),
            )
        finally:
            session._credentials = None  # type: ignore[attr-defined]
    announce_handshakes(copy._endpoint.http_session)
    _end_in_time(copy._endpoint.http_session, seconds)
    return copy  # type: ignore[no-any-return]


def _end_in_time(http_session: Any, seconds: float) -> None:
    """Let each call that takes longer than ``seconds`` raise a timeout.

    A call with a long body gets more time. After the timeout, the thread that makes the call goes
    on until the server responds or hangs up.
    """
    send = http_session.send

    def send_in_time(request: Any) -> Any:
        longest = seconds + len(request.body or b"") / _SLOWEST_BYTES_PER_SECOND
        sent = call_in_time(partial(send, request), seconds=longest)
        if sent is None:  # no thread can start, so only botocore's own timeouts apply
            return send(request)
        if not sent.done():
            raise ReadTimeoutError(endpoint_url=request.url)
        return sent.result()

    http_session.send = send_in_time


#: All clients share one session, because a session has 8 MB of service descriptions. The lock
#: guards the session, because ``_copy`` sets the session's credentials for a moment.
_SESSION_LOCK = threading.Lock()


@cache
def _session() -> Session:
    return get_session()


def _key(channel: Any, url: str) -> tuple[Any, ...]:
    """Return a queue's Region, access key, secret key and role.

    Queues with equal keys share clients.
    """
    options: Mapping[str, Any] = next(
        (queue for queue in channel.predefined_queues.values() if queue["url"] == url), {}
    )
    role = None
    if channel.predefined_queues:
        role = options.get("sts_role_arn") or channel.transport_options.get("sts_role_arn")
    return (
        options.get("region", channel.region),
        None if role else options.get("access_key_id", channel.conninfo.userid),
        None if role else options.get("secret_access_key", channel.conninfo.password),
        role,
    )


# Credentials


def _renew_beside(credentials: Any) -> None:
    """Let a separate thread renew the credentials, if botocore can renew them.

    Several clients may share one credentials object, so replace its method only once.
    """
    if isinstance(credentials, RefreshableCredentials) and "get_frozen_credentials" not in vars(
        credentials
    ):
        renewal = _Renewal(credentials)
        credentials.get_frozen_credentials = renewal.get_frozen_credentials  # type: ignore[method-assign]


def _wait_for_credentials(fetch: SharedCall[_Result], method: str = "broker") -> _Result:
    """Wait for a fetch of credentials, and return its result. Start the fetch if needed.

    Args:
        fetch: the call that fetches the credentials, or that makes clients with them.
        method: botocore's name of the credentials' source.

    Raises:
        CredentialsNotRenewed: the fetch has taken 30 seconds, and goes on. Or the source was not
            reached, or it refused.
        Exception: any other exception of ``fetch``.
    """
    try:
        return fetch.result(seconds=_WITHOUT_SECONDS)
    except SharedCall.TakesTooLong:
        raise CredentialsNotRenewed(provider=method, error_msg="no answer") from None
    except (ClientError, NotConnected, HTTPClientError) as exc:  # of STS, not of SQS
        raise CredentialsNotRenewed(provider=method, error_msg=code_of(exc)) from exc


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
            # A failed renewal does no harm, because the old credentials are valid. botocore logs
            # the failure.
            with suppress(Exception):
                self._renewal.result(seconds=_WITH_GOOD_SECONDS)
            return self._good() or good
        _wait_for_credentials(self._renewal, credentials.method)
        # A renewal that began while the old token was valid does not raise if it fails.
        if (good := self._good()) is None:
            raise CredentialsNotRenewed(
                provider=credentials.method, error_msg="expired during the renewal"
            )
        return good

    def _good(self) -> Any:
        """Return the credentials, or ``None`` if they have expired."""
        return None if self._credentials._is_expired() else self._credentials._frozen_credentials

    def _run(self) -> Any:
        with handshakes.one():
            return self._renew()


def _role_credentials(fetch: Callable[[], Mapping[str, Any]]) -> RefreshableCredentials:
    """Fetch a role's token, and return credentials that renew it before it expires."""

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
        mandatory_timeout=0,  # a failed renewal raises only if the token has expired
    )

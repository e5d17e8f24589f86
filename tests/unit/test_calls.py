"""``Calls`` makes the calls to SQS. It returns each failure as a result and never raises."""

import botocore.exceptions
import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.errors import Failure, Kind

URL = "https://sqs.example/1/q"


class Client:
    """An SQS client that answers each call by calling ``respond``, which may raise."""

    def __init__(self, respond):
        self.requests = []
        self._respond = respond

    def __getattr__(self, name):
        def call(**parameters):
            self.requests.append((name, parameters))
            return self._respond(**parameters)

        return call


def raising(exc):
    def respond(**_):
        raise exc

    return Client(respond)


def responding(response):
    return Client(lambda **_: response)


def all_results(client):
    """Make each kind of call once. Return the failure of each, or None if it succeeded."""
    calls = Calls(client, URL)
    received = calls.receive(max_messages=1, wait_seconds=0)
    attributes = calls.attributes()
    return [
        received.failure,
        attributes if isinstance(attributes, Failure) else None,
        *calls.change_visibility([("h", 1)]),
        *calls.delete(["h"]),
        *calls.send([{"MessageBody": "b"}]),
    ]


def an_instance(cls):
    try:
        if issubclass(cls, ClientError):
            return cls({"Error": {"Code": "Oops"}}, "DeleteMessageBatch")
        return cls(**dict.fromkeys(_fields(cls), "x"))
    except TypeError:
        return cls.__new__(cls)


def _fields(cls):
    import string

    names = {name for _, name, _, _ in string.Formatter().parse(getattr(cls, "fmt", "")) if name}
    return {name.partition(".")[0].partition("[")[0] for name in names} | {"error"}


EXCEPTIONS = [
    value
    for value in vars(botocore.exceptions).values()
    if isinstance(value, type) and issubclass(value, Exception)
] + [RuntimeError, OSError, ValueError, KeyError, RecursionError, MemoryError, StopIteration]


def test_exceptions():
    """Whatever exception the client raises, ``Calls`` returns it as a failure of the whole call."""
    assert len(EXCEPTIONS) > 90
    for cls in EXCEPTIONS:
        results = all_results(raising(an_instance(cls)))
        assert len(results) == 5, cls
        assert all(isinstance(each, Failure) and each.is_of_call for each in results), cls


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["Successful", "Failed", "Id", "Code", "Messages", "Attributes", "0"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(json_like)
def test_malformed_response(response):
    """Each call returns a result even if SQS's response is malformed."""
    assert len(all_results(responding(response))) == 5


@given(json_like, json_like, json_like)
def test_malformed_error(error, metadata, status):
    """A ``ClientError`` with a malformed response is returned as a failure."""
    response = {"Error": error, "ResponseMetadata": metadata}
    exc = ClientError({}, "x")
    exc.response = response if status else status
    assert all(isinstance(result, Failure) for result in all_results(raising(exc)))


def test_listed_as_successful():
    """In a batch, only the entries that SQS lists as successful count as done."""
    client = responding({"Successful": [{"Id": "1"}], "Failed": [{"Id": "2", "Code": "A.B"}]})
    not_listed, done, failed = Calls(client, URL).delete(["a", "b", "c"])
    assert not_listed.may_have_been_done
    assert done is None
    assert (failed.code, failed.is_of_call) == ("B", False)


@pytest.mark.parametrize("response", [{}, {"Successful": []}], ids=["empty", "empty list"])
def test_empty_200(response):
    """If SQS answers 200 with an empty body, the message may or may not have been sent."""
    [failure] = Calls(responding(response), URL).send([{"MessageBody": "b"}])
    assert failure.kind is Kind.IN_DOUBT


@pytest.mark.parametrize("code", ["ExpiredToken", "SignatureDoesNotMatch", "InvalidClientTokenId"])
def test_expired_credentials(code):
    """If SQS says that the credentials expired, ``Calls`` refreshes them and calls again."""
    expired = raising(ClientError({"Error": {"Code": code}}, "x"))
    clients = [expired]
    calls = Calls(
        lambda: clients[-1],
        URL,
        refresh=lambda: clients.append(responding({"Successful": [{"Id": "0"}]})),
    )
    assert calls.delete(["h"]) == [None]
    assert calls.on(URL + "2").delete(["h"]) == [None]
    assert len(expired.requests) == 1


def test_still_expired():
    """If the credentials stay expired after a refresh, the call fails without a second refresh."""
    client, refreshed = raising(RuntimeError("still expired")), []
    calls = Calls(client, URL, refresh=lambda: refreshed.append(1))
    [failure] = calls.delete(["h"])
    assert failure.kind is Kind.CREDENTIALS
    assert (len(client.requests), len(refreshed)) == (2, 1)


def test_failed_refresh():
    """If the refresh of the credentials raises, the call returns a failure."""

    def refresh():
        raise OSError("no token file")

    client = raising(ClientError({"Error": {"Code": "ExpiredToken"}}, "x"))
    [failure] = Calls(client, URL, refresh=refresh).delete(["h"])
    assert (failure.kind, failure.code) == (Kind.CREDENTIALS, "OSError")


def test_missing_permission():
    """If SQS denies a call for lack of a permission, the credentials are not refreshed."""
    refreshed = []
    client = raising(ClientError({"Error": {"Code": "AccessDenied"}}, "x"))
    [failure] = Calls(client, URL, refresh=lambda: refreshed.append(1)).delete(["h"])
    assert (failure.kind, refreshed) == (Kind.DENIED, [])


def test_nothing_to_delete():
    """``Calls`` makes no call for an empty batch."""
    client = responding({})
    assert Calls(client, URL).delete([]) == []
    assert client.requests == []

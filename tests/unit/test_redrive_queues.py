"""How a redrive finds its queues: the dead-letter queue, its source queues and the destination.

The source queues are those whose redrive policy names the dead-letter queue.
"""

from types import SimpleNamespace

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from celery_sqs_backoff.redrive import queues
from celery_sqs_backoff.redrive.errors import RedriveRefused, RedriveUnreachable
from celery_sqs_backoff.redrive.queues import ask, find_endpoint, find_route
from celery_sqs_backoff.sqs.calls import Calls
from celery_sqs_backoff.sqs.errors import Failure, Kind
from celery_sqs_backoff.sqs.find_queue import QueueFinder

ARN = "arn:aws:sqs:us-east-1:123456789012:"
BASE = "https://sqs.us-east-1.amazonaws.com/123456789012/"


def error(code, status=400):
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "Call")


class Sqs:
    """A fake SQS whose queues are given by name, each with the name of its dead-letter queue."""

    def __init__(self, **dlq_of):
        self.dlq_of = dlq_of
        self.errors, self.slept = {}, 0

    def _fail(self, call):
        if self.errors.get(call):
            raise self.errors[call].pop(0)

    def get_queue_attributes(self, *, QueueUrl, AttributeNames):  # noqa: N803
        self._fail("get_queue_attributes")
        name = QueueUrl.rpartition("/")[2]
        if name not in self.dlq_of:
            raise error("AWS.SimpleQueueService.NonExistentQueue")
        found = {"QueueArn": ARN + name}
        if dlq := self.dlq_of[name]:
            found["RedrivePolicy"] = f'{{"deadLetterTargetArn":"{ARN}{dlq}","maxReceiveCount":"5"}}'
        return {"Attributes": found}

    def get_queue_url(self, *, QueueName):  # noqa: N803
        self._fail("get_queue_url")
        if QueueName not in self.dlq_of:
            raise error("AWS.SimpleQueueService.NonExistentQueue")
        return {"QueueUrl": BASE + QueueName}

    def get_paginator(self, call):
        def paginate(*, QueueUrl):  # noqa: N803
            self._fail(call)
            name = QueueUrl.rpartition("/")[2]
            found = sorted(BASE + q for q, dlq in self.dlq_of.items() if dlq == name)
            return SimpleNamespace(build_full_result=lambda: {"queueUrls": found})

        return SimpleNamespace(paginate=paginate)

    def list_queues(self):
        self._fail("list_queues")
        return {"QueueUrls": [BASE + name for name in self.dlq_of]}


class Clients:
    """A fake of our clients: one client for all queues except those in ``of_url``."""

    def __init__(self, sqs):
        self.sqs, self.of_url = sqs, {}

    def attach(self, channel):
        pass

    def settling(self, url):
        return Calls(lambda: self.of_url.get(url, self.sqs), url)


@pytest.fixture
def broker(monkeypatch):
    monkeypatch.setattr(queues, "sleep", lambda seconds: None)

    def broker(sqs):
        channel = SimpleNamespace(predefined_queues={}, canonical_queue_name=lambda name: name)
        monkeypatch.setattr(
            "celery_sqs_backoff.sqs.find_queue.Clients", lambda attempts: Clients(sqs)
        )
        return QueueFinder(channel)

    return broker


CHAIN = {"graveyard": None, "bulk-dlq": "graveyard", "bulk": "bulk-dlq"}


@pytest.mark.parametrize(
    "errors",
    [[error("ServiceUnavailable", 503)], [error("Throttling")] * 3, [error("InternalError", 500)]],
    ids=["503", "throttled", "500"],
)
def test_source_list_error(broker, errors):
    """If SQS fails to list a queue's source queues, the redrive asks again.

    Here ``bulk-dlq`` is the dead-letter queue of ``bulk``, and ``graveyard`` is that of
    ``bulk-dlq``. Without the list, the redrive would take ``bulk-dlq`` for a main queue, and would
    send the messages of ``graveyard`` to it.
    """
    sqs = Sqs(**CHAIN)
    sqs.errors["list_dead_letter_source_queues"] = list(errors)
    with pytest.raises(RedriveRefused, match="bulk-dlq has a dead-letter queue itself"):
        find_route(broker(sqs), "bulk-dlq", to=None, force=False)
    sqs.errors["list_dead_letter_source_queues"] = list(errors)
    route = find_route(broker(sqs), "bulk-dlq", to=None, force=True)
    assert (route.source.name, route.default.name) == ("bulk-dlq", "bulk")


@pytest.mark.parametrize("code", ["AccessDenied", "ServiceUnavailable"])
def test_source_list_unreadable(broker, code):
    """If SQS does not list a queue's source queues at all, the redrive does not begin."""
    sqs = Sqs(**CHAIN)
    sqs.errors["list_dead_letter_source_queues"] = [error(code, 403)] * 100
    with pytest.raises(RedriveUnreachable, match=f"Cannot list the queues .*{code}"):
        find_route(broker(sqs), "bulk-dlq", to=None, force=True)


def test_source_list_not_supported(broker):
    """If the server has no call that lists source queues, the redrive looks at all queues."""
    sqs = Sqs(**CHAIN)
    sqs.errors["list_dead_letter_source_queues"] = [error("InvalidAction")] * 100
    sqs.errors["list_queues"] = [error("Throttling")]
    route = find_route(broker(sqs), "bulk-dlq", to=None, force=True)
    assert [queue.name for queue in route.sources] == ["bulk"]


@pytest.mark.parametrize(
    "name",
    [
        "arn:aws:sqs:eu-west-1:123456789012:mail-dlq",
        "arn:aws:sqs:us-east-1:999999999999:mail-dlq",
        "arn:aws-cn:sqs:us-east-1:123456789012:mail-dlq",
        "https://sqs.eu-west-1.amazonaws.com/123456789012/mail-dlq",
        "https://sqs.us-east-1.amazonaws.com/999999999999/mail-dlq",
        "https://sqs-fips.us-west-2.amazonaws.com/123456789012/mail-dlq",
        "https://vpce-0a-1b.sqs.eu-west-1.vpce.amazonaws.com/123456789012/mail-dlq",
    ],
)
@pytest.mark.parametrize("as_what", ["source", "to"])
def test_other_account_or_region(broker, name, as_what):
    """A redrive refuses a queue of another account or Region."""
    sqs = Sqs(mail="mail-dlq", **{"mail-dlq": None, "other-dlq": None})
    source, to = (name, None) if as_what == "source" else ("other-dlq", name)
    with pytest.raises(RedriveRefused, match="not in the account and Region"):
        find_route(broker(sqs), source, to=to, force=False)


@pytest.mark.parametrize(
    "name",
    [
        "mail-dlq",
        ARN + "mail-dlq",
        BASE + "mail-dlq",
        "http://localhost:1/123456789012/mail-dlq",
        "https://queue.amazonaws.com/123456789012/mail-dlq",
    ],
)
def test_same_queue(broker, name):
    """A redrive refuses its own dead-letter queue as the destination, however it is written."""
    sqs = Sqs(mail="mail-dlq", **{"mail-dlq": None})
    with pytest.raises(RedriveRefused, match="are the same queue"):
        find_route(broker(sqs), "mail-dlq", to=name, force=False)


@pytest.mark.parametrize("name", ["../mail", "a b", "arn:aws:sqs:us-east-1:1:../mail", "x" * 81])
def test_invalid_name(broker, name):
    """A redrive refuses a name that no queue can have, without a call to SQS."""
    sqs = Sqs(mail=None)
    sqs.errors["get_queue_url"] = [AssertionError("asked")]
    with pytest.raises(RedriveRefused):
        find_endpoint(broker(sqs), name)


def test_reads_are_repeated(broker):
    """If a call that reads about queues fails for a passing reason, the redrive repeats it."""
    sqs = Sqs(mail="mail-dlq", **{"mail-dlq": None})
    refused = EndpointConnectionError(endpoint_url="x")
    sqs.errors = {
        "get_queue_url": [refused, error("Throttling")],
        "get_queue_attributes": [error("ServiceUnavailable", 503), error("ExpiredToken")],
        "list_dead_letter_source_queues": [refused],
    }
    assert find_route(broker(sqs), "mail-dlq", to=None, force=False).default.name == "mail"


def test_number_of_tries(broker):
    """A redrive tries to read up to six times, but only once if the failure is permanent."""
    calls, transient, final = [], Failure(Kind.THROTTLED, "x"), Failure(Kind.DENIED, "y")

    def call(result):
        calls.append(result)
        return result

    with pytest.raises(RedriveUnreachable, match="Cannot read: x"):
        ask("Cannot read", lambda: call(transient))
    assert len(calls) == 6
    with pytest.raises(RedriveUnreachable, match="Cannot read: y"):
        ask("Cannot read", lambda: call(final))
    assert len(calls) == 7


def test_namesake_source(broker):
    """A redrive does not send to a queue of the same name in another Region."""
    found = broker(Sqs(**{"mail-dlq": None, "mail": "mail-dlq"}))
    namesake = Sqs(mail=None)
    elsewhere = {"Attributes": {"QueueArn": "arn:aws:sqs:eu-west-1:123456789012:mail"}}
    namesake.get_queue_attributes = lambda **_: elsewhere
    urls = {"eu": BASE.replace("us-east-1", "eu-west-1") + "mail", "us": BASE + "mail"}
    found._clients.of_url[urls["eu"]] = namesake
    found._channel.predefined_queues = {key: {"url": url} for key, url in urls.items()}
    route = find_route(found, ARN + "mail-dlq", to=None, force=False)
    assert [queue.url for queue in route.sources] == [BASE + "mail"]


class TwoRegions(Sqs):
    """A fake SQS with the same queues in each Region. A queue's URL tells its Region."""

    def get_queue_attributes(self, *, QueueUrl, AttributeNames):  # noqa: N803
        found = super().get_queue_attributes(QueueUrl=QueueUrl, AttributeNames=AttributeNames)
        region = QueueUrl.partition("sqs.")[2].partition(".")[0]
        attributes = found["Attributes"]
        return {"Attributes": {k: v.replace("us-east-1", region) for k, v in attributes.items()}}


@pytest.mark.parametrize("predefined", ["mail", "mail-dlq"])
def test_namesakes_in_two_regions(broker, predefined):
    """If two Regions have a queue with the given name, the redrive asks for its ARN."""
    found = broker(TwoRegions(**{"mail-dlq": None, "mail": "mail-dlq"}))
    urls = {"eu": BASE.replace("us-east-1", "eu-west-1") + predefined, "us": BASE + predefined}
    found._channel.predefined_queues = {key: {"url": url} for key, url in urls.items()}
    with pytest.raises(RedriveRefused, match="give its ARN"):
        find_endpoint(found, "mail-dlq")
    for region in ("eu-west-1", "us-east-1"):
        arn = ARN.replace("us-east-1", region) + "mail-dlq"
        assert str(find_endpoint(found, arn).arn) == arn
        assert region in find_endpoint(found, arn).url


def test_predefined_credentials(broker):
    """A redrive uses the credentials of a predefined queue, as workers do.

    It uses them for the dead-letter queue of that queue too.
    """
    sqs, own = (
        Sqs(mail="mail-dlq", **{"mail-dlq": None}),
        Sqs(mail="mail-dlq", **{"mail-dlq": None}),
    )
    found = broker(sqs)
    found._channel.predefined_queues = {"mail": {"url": f"{BASE}mail"}}
    found._clients.of_url[f"{BASE}mail"] = own
    route = find_route(found, "mail", to=None, force=False)
    assert route.source.calls._client() is own
    assert route.default.calls._client() is own


def test_celery_name_first(broker):
    """A name means the queue that Celery calls so, and not a queue whose URL ends in the name."""
    found = broker(Sqs(**{"mail": None, "prod-mail": None}))
    urls = {"old": BASE + "mail", "mail": BASE + "prod-mail"}
    found._channel.predefined_queues = {key: {"url": url} for key, url in urls.items()}
    assert find_endpoint(found, "mail").name == "prod-mail"


BOTH = {
    "mail": "mail-dlq", "mail-dlq": None,
    "staging-mail": "staging-mail-dlq", "staging-mail-dlq": None,
}  # fmt: skip


def staging(broker, sqs):
    """Return the queue finder of an app whose ``queue_name_prefix`` is ``staging-``."""
    found = broker(sqs)
    found._channel.canonical_queue_name = lambda name: f"staging-{name}"
    return found


@pytest.mark.parametrize("base", [ARN, BASE])
def test_arn_is_not_prefixed(broker, base):
    """The app's ``queue_name_prefix`` is put before a plain name, but not into an ARN or URL.

    The ARN of ``mail`` means the queue ``mail`` and not ``staging-mail``.
    """
    assert find_endpoint(staging(broker, Sqs(**BOTH)), "mail").name == "staging-mail"
    route = find_route(staging(broker, Sqs(**BOTH)), f"{base}mail-dlq", to=None, force=False)
    assert (route.source.name, route.default.name) == ("mail-dlq", "mail")
    assert find_endpoint(staging(broker, Sqs(**BOTH)), f"{base}mail").name == "mail"
    found = broker(Sqs(**BOTH))
    found._channel.predefined_queues = {"mail": {"url": f"{BASE}staging-mail"}}
    assert find_endpoint(found, f"{base}mail").name == "mail"


def test_dlq_without_prefix(broker):
    """``queue_name_prefix`` is not put before the dead-letter queue that a redrive policy names."""
    queues = {**BOTH, "staging-mail": "mail-dlq", "staging-bulk": "staging-mail-dlq"}
    route = find_route(staging(broker, Sqs(**queues)), "mail", to=None, force=False)
    assert route.source.name == "mail-dlq"


def forbid(sqs, *names, code="AccessDenied"):
    read = sqs.get_queue_attributes

    def get_queue_attributes(*, QueueUrl, AttributeNames):  # noqa: N803
        if QueueUrl.rpartition("/")[2] in names:
            raise error(code, 403)
        return read(QueueUrl=QueueUrl, AttributeNames=AttributeNames)

    sqs.get_queue_attributes = get_queue_attributes
    return sqs


@pytest.mark.parametrize("name", ["mail-dlq", ARN + "mail-dlq", BASE + "mail-dlq"])
@pytest.mark.parametrize("mail", ["mail", "not predefined"])
def test_rights_to_other_queues(broker, name, mail):
    """A redrive of one queue needs no right to the app's other queues."""
    sqs = Sqs(**{"payments": "payments-dlq", mail: "mail-dlq", "mail-dlq": None})
    found = broker(forbid(sqs, "payments"))
    urls = {key: {"url": BASE + key} for key in ("payments", mail) if key != "not predefined"}
    found._channel.predefined_queues = urls
    route = find_route(found, name, to=None, force=False)
    assert str(route.source.arn) == ARN + "mail-dlq"


def test_empty_destination(broker):
    """A redrive refuses an empty destination.

    Otherwise ``--to "$TO"`` with an unset variable would send messages where the user did not want.
    """
    sqs = Sqs(mail="mail-dlq", **{"mail-dlq": None})
    with pytest.raises(RedriveRefused, match="no queue ''"):
        find_route(broker(sqs), "mail-dlq", to="", force=False)

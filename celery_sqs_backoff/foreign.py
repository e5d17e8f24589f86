"""Run tasks for messages from senders other than Celery, such as S3, SNS and EventBridge.

Name one adapter per queue in the app's settings::

    from celery_sqs_backoff.foreign import s3

    app.conf.sqs_backoff = {"foreign": {"uploads": s3("shop.tasks.on_upload")}}

An adapter is a callable ``(body, attributes) -> (task name, args, kwargs)``. It gets the message's
body as text, and its message attributes by name, as text or bytes. For a message that needs no
task, the adapter returns :data:`IGNORE`, and the worker deletes the message. For a message that the
adapter does not understand, the adapter returns ``None``. The worker then hides the message and
tries again after a delay. At the last receive that its queue allows, the message becomes a dead
letter, if there is a dead-letter queue.

The worker's main process calls the adapter for messages that Celery has not sent, so the adapter
must be quick. The adapter is called again at each receive of the same message, so its result must
depend only on its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Literal
from urllib.parse import unquote_plus

from .text import read_json_object

__all__ = ["IGNORE", "Adapter", "Call", "eventbridge", "s3", "sns"]


class _Ignore(Enum):
    IGNORE = "ignore"


#: An adapter returns this for a message that needs no task. The worker deletes the message.
IGNORE: Final = _Ignore.IGNORE

#: Task name, positional and keyword arguments.
Call = tuple[str, list[Any], dict[str, Any]]

#: Converts a message's body and attributes into a task's call. Returns ``IGNORE`` if the message
#: needs no task, and ``None`` if it does not know the format.
Adapter = Callable[[str, Mapping[str, Any]], "Call | Literal[_Ignore.IGNORE] | None"]


def s3(task: str) -> Adapter:
    """Return an adapter that calls a task with the records of an S3 event notification.

    The task gets one argument: a list of dicts with ``event`` (such as ``ObjectCreated:Put``),
    ``bucket``, ``key`` (decoded; S3 sends it URL-encoded), ``size`` in bytes, ``etag``,
    ``version_id``, ``sequencer``, ``time`` (ISO 8601) and ``region``. A value that S3 did not send
    is ``None``. The worker deletes an ``s3:TestEvent``, which S3 sends when you set up a
    notification.
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/notification-content-structure.html

    Arguments:
        task: the task's name.
    """

    def adapt(body: str, attributes: Mapping[str, Any]) -> Any:
        found = read_json_object(body)
        if found is None:
            return None
        if found.get("Event") == "s3:TestEvent":
            return IGNORE
        records = found.get("Records")
        if not isinstance(records, list) or not records:
            return None
        return task, [[_s3_record(record) for record in records]], {}

    return adapt


def _s3_record(record: Mapping[str, Any]) -> dict[str, Any]:
    stored, item = record["s3"], record["s3"]["object"]
    return {
        "event": record["eventName"],
        "bucket": stored["bucket"]["name"],
        "key": unquote_plus(item["key"]),
        "size": item.get("size"),
        "etag": item.get("eTag"),
        "version_id": item.get("versionId"),
        "sequencer": item.get("sequencer"),
        "time": record.get("eventTime"),
        "region": record.get("awsRegion"),
    }


#: Types of messages about the subscription itself, which contain no published message.
_SNS_CONFIRMATIONS = ("SubscriptionConfirmation", "UnsubscribeConfirmation")


def sns(task: str | Adapter) -> Adapter:
    """Return an adapter that calls a task with a message that was published to an SNS topic.

    The task gets keyword arguments: ``message`` (text), ``subject`` and ``topic_arn`` (text or
    ``None``), and ``attributes`` (the SNS message attributes by name, as text). With raw message
    delivery, the SQS message has no subject and no topic, so ``subject`` and ``topic_arn`` are
    ``None``. A request to confirm a subscription calls no task and is not deleted, because a person
    must decide about it.
    https://docs.aws.amazon.com/sns/latest/dg/sns-sqs-as-subscriber.html

    Arguments:
        task: the task's name, or another adapter, which gets the published message as its body:
            ``sns(s3("shop.tasks.on_upload"))``.
    """

    def adapt(body: str, attributes: Mapping[str, Any]) -> Any:
        found = read_json_object(body)
        message, subject, topic_arn = body, None, None
        if found is not None and found.get("Type") in _SNS_CONFIRMATIONS and "TopicArn" in found:
            return None
        if found is not None and found.get("Type") == "Notification" and "TopicArn" in found:
            message, topic_arn = str(found["Message"]), str(found["TopicArn"])
            subject = found.get("Subject")
            attributes = {
                str(name): value["Value"]
                for name, value in (found.get("MessageAttributes") or {}).items()
            }
        if callable(task):
            return task(message, attributes)
        texts = {name: v for name, v in attributes.items() if isinstance(v, str)}
        return (
            task,
            [],
            {"message": message, "subject": subject, "topic_arn": topic_arn, "attributes": texts},
        )

    return adapt


def eventbridge(task: str) -> Adapter:
    """Return an adapter that calls a task with an EventBridge event.

    The task gets one argument: the event, a dict with ``id``, ``detail-type``, ``source``,
    ``account``, ``time``, ``region``, ``resources`` and ``detail``.
    https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-events-structure.html

    Arguments:
        task: the task's name.
    """

    def adapt(body: str, attributes: Mapping[str, Any]) -> Any:
        found = read_json_object(body)
        if found is None or not {"detail-type", "source", "detail"} <= found.keys():
            return None
        return task, [found], {}

    return adapt

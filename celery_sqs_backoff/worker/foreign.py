"""Makes tasks of messages that Celery has not sent, by the adapters that the app names."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from kombu.utils.imports import symbol_by_name

from ..foreign import IGNORE, Adapter
from ..text import nests_too_deep
from .payload import NotUnderstood

#: The payload of a message that needs no task.
IGNORED: Final[dict[str, Any]] = {}


class Foreign:
    """The adapters of an app.

    Arguments:
        consumer: Celery's. The setting ``foreign`` of its app has the adapters, each a callable or
            where to import it from, by the queue's name in Celery.
    """

    def __init__(self, consumer: Any) -> None:
        settings = consumer.app.conf.get("sqs_backoff") or {}
        self._consumer = consumer
        self._adapters: dict[str, Adapter] = {
            queue: symbol_by_name(adapter) if isinstance(adapter, str) else adapter
            for queue, adapter in (settings.get("foreign") or {}).items()
        }

    def payload(self, queue: str, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make the payload of a task, or return ``None`` if the queue has no adapter.

        Raises:
            NotUnderstood: the adapter raised, returned ``None``, or no call of a task here.
        """
        adapter = self._adapters.get(queue)
        if adapter is None:
            return None
        attributes = {
            name: value.get("StringValue", value.get("BinaryValue"))
            for name, value in (message.get("MessageAttributes") or {}).items()
        }
        try:
            call = adapter(message["Body"], attributes)
        except BaseException as exc:  # noqa: BLE001  # sys.exit() would end the poller's thread
            raise NotUnderstood(f"the adapter raised {type(exc).__name__}") from None
        if call is None:
            raise NotUnderstood("the adapter does not understand it")
        if call is IGNORE:
            return IGNORED
        try:
            task, args, kwargs = call
            if nests_too_deep([args, kwargs]):
                raise RecursionError
            if not isinstance(task, str) or task not in self._consumer.strategies:
                raise NotUnderstood("the adapter named a task that is not registered here")
            return self._payload(task, list(args), dict(kwargs), message["MessageId"], queue)
        except NotUnderstood:
            raise
        except Exception as exc:  # noqa: BLE001  # its result may do anything, or be too deep
            raise NotUnderstood(
                f"the adapter returned no (task, args, kwargs) in JSON ({type(exc).__name__})"
            ) from None

    def _payload(
        self, task: str, args: list[Any], kwargs: dict[str, Any], task_id: str, queue: str
    ) -> dict[str, Any]:
        """Return the payload of a task, as Celery would have sent it.

        Its ID is that of the message, so it is the same at each receive.
        """
        sent = self._consumer.app.amqp.as_task_v2(
            task_id,
            task,
            args,
            kwargs,
            # Celery logs these, and a stranger has sent the arguments.
            argsrepr="(...)",
            kwargsrepr="{...}",
            origin=self._consumer.hostname,
            ignore_result=None,  # as the task says: Celery 5.7 takes False for a call's wish
        )
        return {
            "body": base64.b64encode(json.dumps(sent.body).encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": sent.headers,
            "properties": {
                **sent.properties,
                "body_encoding": "base64",
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": 0,
            },
        }

"""Makes tasks of messages that Celery has not sent, by the adapters that the app names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kombu.utils.imports import symbol_by_name

from ..foreign import IGNORE, Adapter
from .payload import NotUnderstood, task_payload

#: The payload of a message that there is nothing to do for.
IGNORED: Final[dict[str, Any]] = {}


class Foreign:
    """The adapters of an app.

    Arguments:
        adapters: by the queue's name in Celery: a callable, or where to import it from.
        is_registered: whether the worker has a task of this name.
        origin: the ``origin`` header of the tasks.
    """

    def __init__(
        self,
        adapters: Mapping[str, str | Adapter],
        *,
        is_registered: Callable[[str], bool],
        origin: str,
    ) -> None:
        self._adapters: dict[str, Adapter] = {
            queue: symbol_by_name(adapter) if isinstance(adapter, str) else adapter
            for queue, adapter in adapters.items()
        }
        self._is_registered = is_registered
        self._origin = origin

    def payload(self, queue: str, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Make the payload of a task; ``None`` if the queue has no adapter.

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
            if not self._is_registered(task):
                raise NotUnderstood("the adapter named a task that is not registered here")
            return task_payload(
                task,
                args,
                kwargs,
                task_id=message["MessageId"],
                queue=queue,
                origin=self._origin,
            )
        except NotUnderstood:
            raise
        except Exception as exc:  # noqa: BLE001  # what it returned may do anything, or be too deep
            raise NotUnderstood(
                f"the adapter returned no (task, args, kwargs) in JSON ({type(exc).__name__})"
            ) from None

"""Celery signals of this package. The worker sends them in its main process.

>>> from celery_sqs_backoff.signals import lease_lost
>>> @lease_lost.connect(weak=False)
... def tell_the_person_on_call(sender, message_id, queue, **_):
...     print(f"{sender.name}: message {message_id} of {queue} may be running elsewhere")
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["lease_lost", "provider_changed"]

#: This worker has lost, or may have lost, the message of a task that runs in its pool. Either SQS
#: refuses the receipt handle, or the message's visibility timeout ended while the worker could not
#: reach SQS. Another worker may already be running the message. The worker sends the signal once
#: per run, from a thread of its own, with
#:
#: * ``sender``: the task,
#: * ``task_id``, ``message_id``, ``queue`` (the queue's name): strings.
#:
#: The running task can poll :attr:`celery_sqs_backoff.SQSBackoffTask.lease_lost`.
lease_lost = Signal(name="lease_lost", providing_args={"task_id", "message_id", "queue"})

#: This worker has found that the state of a provider has changed. The worker sends the signals in
#: the order of the changes, from a thread of its own, with
#:
#: * ``sender``: the provider's name,
#: * ``state``: ``"paused"`` (the provider seems to be down, and its messages wait),
#:   ``"recovering"`` (its calls are limited, and its hidden messages come back before their time)
#:   or ``"ok"``,
#: * ``tenant``: a digest of the tenant's ID, or empty if the provider has no ``key``.
provider_changed = Signal(name="provider_changed", providing_args={"state", "tenant"})

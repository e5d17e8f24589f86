"""The rig: a worker's real parts on a strict fake SQS, in one thread and in virtual time.

How to write a test::

    def test_retry(rig):
        \"\"\"State the promise here, in one sentence.\"\"\"
        rig.task(body, backoff=Schedule([7]))    # body(self, ...), and any option of a task
        message = rig.send()                     # Celery publishes the message
        rig.run()                                # the task runs, and the worker hides the message
        assert (message.fate, message.delay) == ("hidden", 7)
        rig.run(Run.lose)                        # 7 s later it runs again, and its process dies
        assert message.receives == 2

Words: A worker has a *lease* on a message from its receive until it deletes the message, hides it
or gives it back. It renews the lease, which means that it extends the visibility timeout. To
*settle* a message is to delete it, hide it, give it back or make it a dead letter. A message *takes
a place* of the prefetch window while it runs or waits for a process.

- Call ``rig.queue(...)`` and ``rig.task(...)`` before the first worker starts. The first
  ``rig.run`` starts a worker. Call ``rig.start_worker`` for more workers, or for other processes,
  pools or queues. All workers share SQS and the clock.
- A run passes through Celery's consumer, our request class, a pickle, Celery's tracer and back, as
  with the prefork pool. ``rig.begin()`` begins a run and returns it. Then call its ``finish``,
  ``lose``, ``fail``, ``exceed_time_limit`` or ``terminate``.
- Call a worker's ``stop``, ``stop_cold``, ``kill``, ``freeze``, ``lose_connection``,
  ``cancel_consumer`` or ``revoke``.
- ``rig.pass_time(60)`` lets a minute pass. In this time workers renew leases and poll queues, and
  messages become visible.
- ``rig.fault("DeleteMessageBatch")`` lets calls to SQS fail: once, often, or for some seconds.
  ``rig.fail_results()`` lets the result backend fail. ``rig.during("ReceiveMessage", do)`` calls
  ``do`` before the response of a call arrives.
- Check facts: ``message.fate``, ``.delay``, ``.record`` and ``.result``, ``rig.calls()`` to SQS,
  and what observers get: ``rig.story()``, ``rig.told()`` and ``rig.celery_events``.
- If a test needs more, add a method here. A test must not use the worker's modules. Only
  ``parts.py`` does, so somebody can rewrite the worker and keep the tests.
"""

from .rig import Message, Rig
from .worker import Run, Worker

__all__ = ["Message", "Rig", "Run", "Worker"]

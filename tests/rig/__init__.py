"""The rig: a worker's real parts on a strict fake SQS, in one thread and in virtual time.

How to write a test::

    def test_retry(rig):
        \"\"\"State the promise here, in one sentence.\"\"\"
        rig.task(body, backoff=Schedule([7]))    # body(self, ...), and any option of a task
        message = rig.send()                     # published by Celery; runs when you say so
        rig.run()                                # the next task runs, and SQS hears of its end
        assert (message.fate, message.delay) == ("hidden", 7)
        rig.run(Run.lose)                        # comes back after 7 s; its process is killed
        assert message.receives == 2

- Before the first worker starts: ``rig.queue(...)`` and ``rig.task(...)``. ``rig.start_worker``
  starts one with other processes, pool or queues; otherwise the first ``rig.run`` does. Several
  workers share SQS and the clock.
- A run passes through Celery's consumer, our request class, a pickle, Celery's tracer and back, as
  with the prefork pool. ``rig.begin()`` returns it while it runs. Then ``finish``, ``lose``,
  ``fail``, ``exceed_time_limit`` or ``terminate`` it.
- A worker is told to ``stop``, ``stop_cold``, ``kill``, ``freeze``, ``lose_connection``,
  ``cancel_consumer`` or ``revoke``.
- ``rig.pass_time(60)`` lets time pass: leases are renewed, queues polled, messages come back.
- ``rig.fault("DeleteMessageBatch")`` lets calls to SQS fail: once, often, or for some seconds.
  ``rig.fail_results()`` does so for the result backend. ``rig.during("ReceiveMessage", do)`` does
  something before the answer of a call has arrived.
- Facts: ``message.fate``, ``.delay``, ``.record``, ``.result``; ``rig.calls()`` to SQS;
  ``rig.story()``, ``rig.told()`` and ``rig.celery_events``, which observers get.
- A test that needs more gets a new verb or fact here. It must not reach into the worker: only
  ``parts.py`` knows its modules, so that they can be written anew under the same tests.
"""

from .rig import Message, Rig
from .worker import Run, Worker

__all__ = ["Message", "Rig", "Run", "Worker"]

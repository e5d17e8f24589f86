"""What is wrong with the app's settings and with what is installed. Needs the app alone, mostly."""

from __future__ import annotations

from collections.abc import Iterator

from ..facts import Facts, QueueFacts
from ..finding import Fix, Report, Rule
from ._fixes import aws_sqs

__all__ = ["RULES"]

#: Messages that a worker may hold beside those that run, from which on it is worth a word.
_MUCH_PREFETCH = 1_000

#: Messages in an event or reply queue, from which on nobody reads it.
_PILED_UP = 100


def _unread_messages(facts: Facts) -> Iterator[Report]:
    if facts.app.events:
        yield (
            "worker_send_task_events",
            "worker_send_task_events is on; expected False on SQS",
            "Each task sends events to a queue that no monitor can read.",
            Fix(text="Set worker_send_task_events = False."),
        )
    for url, messages in sorted(facts.other_queues.items()):
        queue = QueueFacts(name=url.rpartition("/")[2], url=url, attributes=None)
        # A queue_name_prefix comes first; kombu makes a hyphen of the dot after "celeryev".
        is_reply, is_event = queue.name.endswith("reply-celery-pidbox"), "celeryev-" in queue.name
        if (is_reply or is_event) and messages >= _PILED_UP:
            setting = "worker_send_task_events" if is_event else "worker_enable_remote_control"
            yield (
                queue.name,
                f"{messages} messages in a queue that nobody reads",
                "Remote control and events do not work on SQS. You pay for what is sent there, and"
                " SQS keeps it until retention deletes it.",
                Fix(
                    aws=f"{aws_sqs('delete-queue', queue)} --queue-url {url}",
                    text=f"Set {setting} = False.",
                ),
            )


def _exchanges(facts: Facts) -> Iterator[Report]:
    if facts.other_broker is not None:
        return
    for task in facts.app.tasks:
        if task.exchange is not None:
            yield (
                task.name,
                f"it is routed to the exchange {task.exchange} with a routing_key that leads to no"
                " queue",
                "What is sent to it by this route is lost, without an error for its sender.",
                Fix(text="Name a queue in the route, and no exchange."),
            )


def _prefetch(facts: Facts) -> Iterator[Report]:
    app = facts.app
    if not facts.covered:
        return
    if app.prefetch_multiplier == 0:
        yield (
            "worker_prefetch_multiplier",
            "worker_prefetch_multiplier is 0: no limit",
            "One worker takes all messages of a queue and holds them; others stay idle.",
            Fix(text="Set worker_prefetch_multiplier = 4, or 1 for long tasks."),
        )
    elif app.concurrency and app.prefetch_multiplier * app.concurrency > _MUCH_PREFETCH:
        held = app.prefetch_multiplier * app.concurrency
        yield (
            "worker_prefetch_multiplier",
            f"worker_prefetch_multiplier {app.prefetch_multiplier} x concurrency"
            f" {app.concurrency} = {held} messages per worker; expected at most {_MUCH_PREFETCH}",
            "A deploy gives them all back, and each loses one receive.",
            Fix(text="Lower worker_prefetch_multiplier."),
        )


def _memory_store(facts: Facts) -> Iterator[Report]:
    app = facts.app
    if app.store == "memory" and app.pool == "prefork" and not app.runs_here:
        yield (
            "sqs_backoff['store']",
            "the store is memory:// and the pool is prefork",
            "Each process has guards, steps and locks of its own: two runs hold the same lock.",
            Fix(text="Use redis://, django or dynamodb://."),
        )


def _no_store(facts: Facts) -> Iterator[Report]:
    if facts.app.store is None:
        for task in facts.covered:
            if task.needs_store:
                yield (
                    task.name,
                    "the task has a guard, and sqs_backoff['store'] is not set",
                    "Each of its runs fails.",
                    Fix(text="Set sqs_backoff['store'], for example 'redis://host:6379/0'."),
                )


def _store_fails(facts: Facts) -> Iterator[Report]:
    if facts.app.store_failure is not None:
        yield (
            "sqs_backoff['store']",
            f"the store ({facts.app.store}) cannot be used: {facts.app.store_failure}",
            "Tasks with a guard, a step or a lock cannot run; they back off until the store is"
            " back.",
            Fix(text="Check the store's address; with Django, run manage.py migrate."),
        )


def _store_evicts(facts: Facts) -> Iterator[Report]:
    if facts.app.store_eviction is not None:
        yield (
            "sqs_backoff['store']",
            facts.app.store_eviction,
            "When it is full it drops guards, locks and steps of messages under way: work is done"
            " twice.",
            Fix(
                text="Set maxmemory-policy noeviction, or use a server beside the cache's:"
                " when that is full, tasks back off."
            ),
        )


RULES = (
    Rule(
        "W022",
        "A worker prefetches too much",
        "Messages that a worker holds without running them wait there, while other workers may be"
        " idle.",
        _prefetch,
        is_live=False,
    ),
    Rule(
        "E023",
        "The store cannot be used",
        "It was opened and asked for a key that does not exist.",
        _store_fails,
    ),
    Rule(
        "W034",
        "The store drops records when it is full",
        "Each record has an end, so volatile-* policies drop them too."
        " https://redis.io/docs/latest/develop/reference/eviction/",
        _store_evicts,
    ),
    Rule(
        "E024",
        "The store is not shared by the pool's processes",
        "memory:// is for tests and for pools in one process.",
        _memory_store,
        is_live=False,
    ),
    Rule(
        "E025",
        "A guard has no store",
        "A guard remembers which message has passed, for all workers.",
        _no_store,
        is_live=False,
    ),
    Rule(
        "W029",
        "Events or replies are sent, and nobody can read them",
        "Celery's events and remote control need fanout, which SQS does not have:"
        " https://github.com/celery/celery/issues/8348, https://github.com/celery/celery/issues/3280",
        _unread_messages,
        is_live=False,
    ),
    Rule(
        "E037",
        "A task is routed to an exchange",
        "SQS has queues alone. kombu keeps bindings in the memory of each connection, declares that"
        " of the task's queue before it sends, and drops what no binding matches. The patterns of"
        " topic exchanges are not looked at.",
        _exchanges,
    ),
)

"""What is wrong with a queue by itself."""

from __future__ import annotations

from collections.abc import Iterator

from ...sqs.limits import (
    MAX_MESSAGE_BYTES,
    MAX_VISIBILITY_TIMEOUT_SECONDS,
)
from ...units import in_words
from ..facts import Facts, QueueFacts
from ..finding import Fix, Report, Rule
from ._fixes import set_attribute

__all__ = ["RULES"]

#: A visibility timeout from here on is long: a killed worker's messages wait for it to end.
_LONG_SECONDS = 3_600


def _visibility_timeout_zero(facts: Facts) -> Iterator[Report]:
    for queue in facts.consumed:
        if queue.visibility_timeout_seconds == 0:
            yield (
                queue.name,
                "VisibilityTimeout is 0; expected at least 30 seconds",
                "Workers ask for 30 seconds at each receive; whoever does not, such as a worker"
                " without this package, runs every task while others run it too.",
                set_attribute(queue, "VisibilityTimeout", 30),
            )


def _visibility_timeout_long(facts: Facts) -> Iterator[Report]:
    for queue in facts.consumed:
        seconds = queue.visibility_timeout_seconds
        if seconds is not None and seconds >= _LONG_SECONDS:
            at_most = (
                " SQS allows no renewal beyond 12 hours, so a task cannot hold its message"
                " for longer."
                if seconds >= MAX_VISIBILITY_TIMEOUT_SECONDS
                else ""
            )
            yield (
                queue.name,
                f"VisibilityTimeout is {seconds} ({in_words(seconds)}); expected less than"
                f" {_LONG_SECONDS}: workers renew it for tasks with the base class that run longer",
                f"The messages of a killed worker stay hidden for {in_words(seconds)}.{at_most}",
                _lower(queue, [task.name for task in facts.sent_to(queue) if not task.is_covered]),
            )


def _lower(queue: QueueFacts, unrenewed: list[str]) -> Fix:
    """A short visibility timeout repeats tasks whose hold nobody renews: no line to paste then."""
    if not unrenewed:
        return set_attribute(queue, "VisibilityTimeout", 30)
    more = f" and {len(unrenewed) - 1} more" if len(unrenewed) > 1 else ""
    return Fix(
        text=f"First give {unrenewed[0]}{more} the base class, or a queue of their own: nobody"
        " renews the hold on tasks without it, so a lower VisibilityTimeout runs them again while"
        " they run, or wait for their ETA."
    )


def _small_messages(facts: Facts) -> Iterator[Report]:
    for queue in facts.consumed:
        for one in (queue, *([queue.dlq] if queue.dlq else [])):
            size = one.max_message_bytes
            if size is not None and size < MAX_MESSAGE_BYTES:
                yield (
                    one.name,
                    f"MaximumMessageSize is {size} bytes; SQS allows {MAX_MESSAGE_BYTES} since"
                    " August 2025",
                    "A larger message is refused when it is sent; a dead letter whose record does"
                    " not fit loses its traceback.",
                    set_attribute(one, "MaximumMessageSize", MAX_MESSAGE_BYTES),
                )


def _delay(facts: Facts) -> Iterator[Report]:
    for queue in facts.consumed:
        if queue.delay_seconds:
            yield (
                queue.name,
                f"DelaySeconds is {queue.delay_seconds}; expected 0",
                f"Each task without a countdown starts {in_words(queue.delay_seconds)} late.",
                set_attribute(queue, "DelaySeconds", 0),
            )


RULES = (
    Rule(
        "E011",
        "The queue's visibility timeout is 0",
        "A received message must stay hidden until its worker has renewed its hold for the first"
        " time. With 0 SQS shows it again at once.",
        _visibility_timeout_zero,
    ),
    Rule(
        "W012",
        "The queue's visibility timeout is long",
        "It need not be longer than a task with the base class: workers renew their hold on those,"
        " and on no others. It is how long the messages of a killed worker stay hidden. SQS's"
        " maximum is 12 hours from the receive:"
        " https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-visibility-timeout.html",
        _visibility_timeout_long,
    ),
    Rule(
        "I014",
        "The queue refuses messages that SQS would take",
        "Queues made before August 2025 keep their limit of 256 KiB:"
        " https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-messages.html",
        _small_messages,
    ),
    Rule(
        "W015",
        "The queue delays every message",
        "A queue's DelaySeconds applies to each message that brings none of its own. Celery's"
        " countdown and retries need none.",
        _delay,
    ),
)

"""Messages that are held or being settled: one table of rows, pure, for the worker and the redrive.

``rows`` says what a message can become and what each response of SQS makes of that; ``table`` which
calls are due; ``answers`` enters their results; ``book`` and ``agenda`` keep rows findable in time.
Nothing in here knows of Celery, of workers or of threads. Whoever uses it carries out
:class:`Call` by :class:`~celery_sqs_backoff.sqs.calls.Calls`.
"""

from .book import Call, Entry, Event, Happening
from .rows import Content, Purpose, QueueFacts, Row, Want
from .table import SettlementTable

__all__ = [
    "Call",
    "Content",
    "Entry",
    "Event",
    "Happening",
    "Purpose",
    "QueueFacts",
    "Row",
    "SettlementTable",
    "Want",
]

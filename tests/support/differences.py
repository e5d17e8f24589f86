"""Where servers are not alike, as far as a test sees: each difference once, with its source.

A test that meets one still asserts what holds there.
"""

from __future__ import annotations

from typing import Final

from .servers import server_name

#: A receipt handle of a standard queue, after another consumer has received the message. SQS
#: accepts it for ChangeMessageVisibility (recorded by LocalStack's snapshot tests of AWS,
#: test_terminate_visibility_timeout_after_receive), and says of DeleteMessage with it that the
#: message might not be deleted
#: (https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_DeleteMessage.html).
#: ministack refuses both.
STALE_HANDLE_IS_REFUSED: Final = frozenset({"ministack"})

#: When all messages of a group of a FIFO queue have been hidden for the same time, the last one
#: comes back first: five messages as 4, 0, 1, 2, 3. SQS keeps the order
#: (https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/FIFO-queues-understanding-logic.html).
HIDDEN_GROUP_LOSES_ITS_ORDER: Final = frozenset({"moto"})

#: Its backend has no locks: calls at the same time hand a message to two receivers now and then,
#: and delete another one than was asked for. Measured: 1 of 800 messages with 8 receivers, and more
#: while others send.
RACES_WITH_ITSELF: Final = frozenset({"moto"})

#: A receive that does not wait asks some of SQS's machines, and of a short queue it may find
#: nothing though there is something
#: (https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-short-and-long-polling.html).
#: The local ones find all there is.
SHORT_POLL_MAY_FIND_NOTHING: Final = frozenset({"aws"})


def differs(servers: frozenset[str]) -> bool:
    """Return whether this concerns the server that the tests speak to."""
    return server_name() in servers

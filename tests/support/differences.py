"""List the differences between SQS servers that tests can notice, each with its source.

A test that meets a difference asserts the behaviour of the server in use.
"""

from __future__ import annotations

from typing import Final

from .servers import server_name

#: A receipt handle of a standard queue is stale once another consumer has received the message. SQS
#: accepts a stale handle for ChangeMessageVisibility, as LocalStack's snapshot tests of AWS have
#: recorded (test_terminate_visibility_timeout_after_receive). AWS's page on DeleteMessage says
#: that a delete with a stale handle might not delete the message
#: (https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_DeleteMessage.html).
#: ministack refuses a stale handle in both calls.
STALE_HANDLE_IS_REFUSED: Final = frozenset({"ministack"})

#: If all messages of a FIFO group were hidden until the same time, the last one comes back first:
#: five messages come as 4, 0, 1, 2, 3. SQS keeps the order of a group
#: (https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/FIFO-queues-understanding-logic.html).
HIDDEN_GROUP_LOSES_ITS_ORDER: Final = frozenset({"moto"})

#: The server has no locks. With several calls at the same time, it sometimes hands one message to
#: two receivers, or deletes another message than the one in the call. With 8 receivers this was
#: measured for 1 of 800 messages, and for more while other clients send.
RACES_WITH_ITSELF: Final = frozenset({"moto"})

#: A receive that does not wait asks only some of SQS's machines. If the queue has few messages, it
#: may find none of them
#: (https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-short-and-long-polling.html).
#: Local servers find all messages.
SHORT_POLL_MAY_FIND_NOTHING: Final = frozenset({"aws"})


def differs(servers: frozenset[str]) -> bool:
    """Return whether a difference concerns the server that the tests use."""
    return server_name() in servers

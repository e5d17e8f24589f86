"""Where a local server is not like SQS, as far as a test sees: each difference once, with source.

A test that meets one still asserts what holds there.
"""

from __future__ import annotations

from typing import Final

from .servers import server_name

__all__ = ["STALE_HANDLE_IS_REFUSED", "differs"]

#: A receipt handle of a standard queue, after another consumer has received the message. SQS
#: accepts it for ChangeMessageVisibility (recorded by LocalStack's snapshot tests of AWS,
#: test_terminate_visibility_timeout_after_receive), and says of DeleteMessage with it that the
#: message might not be deleted
#: (https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_DeleteMessage.html).
#: ministack refuses both.
STALE_HANDLE_IS_REFUSED: Final = frozenset({"ministack"})


def differs(servers: frozenset[str]) -> bool:
    """Whether the server that the tests speak to is one of these."""
    return server_name() in servers

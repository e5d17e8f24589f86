"""Limits of Amazon SQS, each with the page that states it."""

from typing import Final

#: Longest time that a received message may stay hidden, counted from the moment when SQS got the
#: ReceiveMessage request. An extension does not restart the count.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-visibility-timeout.html
MAX_VISIBILITY_TIMEOUT_SECONDS: Final = 43_200

#: The ``VisibilityTimeout`` of a queue that does not set it.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SetQueueAttributes.html
DEFAULT_VISIBILITY_TIMEOUT_SECONDS: Final = 30

#: Longest long poll (``WaitTimeSeconds``).
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_ReceiveMessage.html
MAX_WAIT_TIME_SECONDS: Final = 20

#: Most entries in SendMessageBatch, DeleteMessageBatch and ChangeMessageVisibilityBatch, and most
#: messages in one response of ReceiveMessage.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-messages.html
MAX_BATCH_ENTRIES: Final = 10

#: Most message attributes on one message, and most bytes of its body and attributes together. A
#: batch may have as many bytes in all its entries together. Same page as for ``MAX_BATCH_ENTRIES``.
MAX_MESSAGE_ATTRIBUTES: Final = 10
MAX_MESSAGE_BYTES: Final = 1_048_576

#: Most messages of one queue that may be received and not yet deleted, such as messages of running
#: tasks and messages hidden by a backoff. At this limit, SQS delivers no further messages. FIFO
#: queues have the same limit since November 2024.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-queues.html
MAX_IN_FLIGHT_MESSAGES: Final = 120_000

#: Most receives that a redrive policy can allow (``maxReceiveCount``).
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
MAX_MAX_RECEIVE_COUNT: Final = 1_000

#: Longest ``DelaySeconds`` of a message or a queue.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SendMessage.html
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-delay-queues.html
MAX_DELAY_SECONDS: Final = 900

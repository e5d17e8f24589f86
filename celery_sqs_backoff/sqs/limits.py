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

#: Highest number of entries in SendMessageBatch, DeleteMessageBatch and
#: ChangeMessageVisibilityBatch, and of messages in one response of ReceiveMessage.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-messages.html
MAX_BATCH_ENTRIES: Final = 10

#: Highest number of attributes on one message, and of bytes in its body and attributes together.
#: All entries of a batch together may have as many bytes as one message. The source is the page for
#: ``MAX_BATCH_ENTRIES``.
MAX_MESSAGE_ATTRIBUTES: Final = 10
MAX_MESSAGE_BYTES: Final = 1_048_576

#: Highest number of messages in flight in one queue. A message is in flight if it was received and
#: not yet deleted, for example while its task runs, or while a backoff hides it. At this limit, SQS
#: delivers no further messages. FIFO queues have the same limit since November 2024.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/quotas-queues.html
MAX_IN_FLIGHT_MESSAGES: Final = 120_000

#: Highest ``maxReceiveCount`` that a redrive policy can have.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-dead-letter-queues.html
MAX_MAX_RECEIVE_COUNT: Final = 1_000

#: Longest ``DelaySeconds`` of a message or a queue.
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SendMessage.html
#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-delay-queues.html
MAX_DELAY_SECONDS: Final = 900

"""Send one mail. If the provider is down, the message stays on SQS and comes back later."""

from celery import shared_task
from django.conf import settings

from celery_sqs_backoff import SQSBackoffTask

from .delivery import deliver
from .errors import provider_errors


@shared_task(base=SQSBackoffTask, classify=(provider_errors,), provider=settings.MAIL_PROVIDER)
def send_mail(mail_id: int) -> None:
    deliver(mail_id)

"""Send one mail. If the provider is down, the message stays on SQS and comes back later."""

import json
from urllib.request import Request, urlopen

from celery import shared_task
from django.conf import settings

from celery_sqs_backoff import SQSBackoffTask

from .errors import provider_errors
from .models import Mail

PROVIDER_TIMEOUT_SECONDS = 5


@shared_task(base=SQSBackoffTask, classify=(provider_errors,))
def send_mail(mail_id: int) -> None:
    mail = Mail.objects.get(pk=mail_id)
    request = Request(
        f"{settings.MAIL_PROVIDER_URL}/mails",
        data=json.dumps({"id": mail.pk, "to": mail.recipient, "subject": mail.subject}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=PROVIDER_TIMEOUT_SECONDS):
        pass  # 2xx: sent. Anything else has been raised.

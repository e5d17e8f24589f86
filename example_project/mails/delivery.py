"""Send a mail by an HTTP call to the provider."""

import json
from urllib.request import Request, urlopen

from django.conf import settings

from .models import Mail

PROVIDER_TIMEOUT_SECONDS = 5


def deliver(mail_id: int) -> None:
    """Send a mail.

    Raises:
        OSError: an error of urllib, because the call has failed.
    """
    mail = Mail.objects.get(pk=mail_id)
    request = Request(
        f"{settings.MAIL_PROVIDER_URL}/mails",
        data=json.dumps({"id": mail.pk, "to": mail.recipient, "subject": mail.subject}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=PROVIDER_TIMEOUT_SECONDS):
        pass  # The status is 2xx, so the mail is sent. For other statuses urlopen raises an error.

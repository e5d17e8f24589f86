"""One mail, handed to the provider over HTTP."""

import json
from urllib.request import Request, urlopen

from django.conf import settings

from .models import Mail

PROVIDER_TIMEOUT_SECONDS = 5


def deliver(mail_id: int) -> None:
    """Send a mail. Raises the error of urllib if that fails."""
    mail = Mail.objects.get(pk=mail_id)
    request = Request(
        f"{settings.MAIL_PROVIDER_URL}/mails",
        data=json.dumps({"id": mail.pk, "to": mail.recipient, "subject": mail.subject}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=PROVIDER_TIMEOUT_SECONDS):
        pass  # 2xx: sent. Anything else has been raised.

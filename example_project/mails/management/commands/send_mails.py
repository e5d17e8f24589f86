"""``manage.py send_mails 300`` writes 300 mails to the database, and queues a task for each."""

from argparse import ArgumentParser
from functools import partial
from typing import Any

from django.core.management import BaseCommand
from django.db import transaction

from ...models import Mail
from ...tasks import send_mail


class Command(BaseCommand):
    help = "Write a number of mails to the database and queue them for sending."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("count", type=int, help="how many mails")

    def handle(self, *args: Any, count: int, **options: Any) -> None:
        with transaction.atomic():
            mails = Mail.objects.bulk_create(
                Mail(recipient=f"customer-{n}@example.com", subject="Your invoice")
                for n in range(1, count + 1)
            )
            for mail in mails:  # queue after the commit, so that a worker finds the row
                transaction.on_commit(partial(send_mail.delay, mail.pk))
        self.stdout.write(f"{len(mails)} mails queued")

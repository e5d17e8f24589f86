"""The mails to send."""

from django.db import models


class Mail(models.Model):
    recipient = models.EmailField()
    subject = models.CharField(max_length=200)

"""The classifiers also work with the sockets of gevent and eventlet."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import smtplib, urllib.request
import requests
from celery_sqs_backoff.classifiers import known_errors
from tests.support.http_faults import nobody, overflowing, silent

def shown(call):
    try:
        call()
    except Exception as exc:
        return known_errors()(exc).outcome.name

with silent() as silence, overflowing() as overflow:
    for url in f"http://{nobody()}", f"http://{overflow}", f"https://{silence}", f"http://{silence}":
        print(shown(lambda: urllib.request.urlopen(url, b"", timeout=0.25)))
        print(shown(lambda: requests.post(url, b"", timeout=0.25)))
    for address in nobody(), overflow, silence:
        print(shown(lambda: smtplib.SMTP(*address.split(":"), timeout=0.25)))
"""


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param("from gevent import monkey; monkey.patch_all()", id="gevent"),
        pytest.param("import eventlet; eventlet.monkey_patch()", id="eventlet"),
    ],
)
def test_green_threads(patch):
    """With green threads, the classifiers tell a failed connection from a missing response."""
    answer = subprocess.run(
        [sys.executable, "-c", patch + PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == [
        *("RETRYABLE", "RETRYABLE"),  # the connection is refused
        *("RETRYABLE", "RETRYABLE"),  # there is no connection in time
        *("RETRYABLE", "RETRYABLE"),  # the server is silent in the TLS handshake
        *("UNKNOWN", "UNKNOWN"),  # the server is silent after the request
        # smtplib: the connection is refused, there is none in time, or the server is silent
        *("RETRYABLE", "RETRYABLE", "RETRYABLE"),
    ]

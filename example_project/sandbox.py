"""Run an SQS and a fake mail provider to try by hand: ``python -m example_project.sandbox``.

They listen at the addresses in ``settings.py``, until Ctrl-C.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from .processes import DemoError, Programs, end_on_signals
from .services import SQS, MailProvider

SQS_PORT, PROVIDER_PORT, CONTROL_PORT = 4566, 8025, 8026


def main() -> int:
    end_on_signals()
    with tempfile.TemporaryDirectory() as temporary, Programs(Path(temporary)) as programs:
        try:
            sqs = SQS(programs, Path(temporary), port=SQS_PORT)
            sqs.create_queue("mails")
            MailProvider(
                programs,
                "provider",
                f"--port={PROVIDER_PORT}",
                f"--control-port={CONTROL_PORT}",
            )
            print(f"SQS:               http://{sqs.address}, queues mails and mails-dlq")
            print(f"mail provider:     http://127.0.0.1:{PROVIDER_PORT}")
            print(f"how it behaves:    http://127.0.0.1:{CONTROL_PORT}")
            print("Press Ctrl-C to end both.", flush=True)
            while True:
                programs.check()
                time.sleep(1)
        except DemoError as exc:
            print(exc, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())

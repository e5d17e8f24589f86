"""A worker with a wrong store ends at its start, with one line that says what to do."""

import os
import subprocess
import sys

from tests.support.cases import cases
from tests.support.processes import free_port
from tests.support.workers import ROOT

MODULE = """
import os
from celery import Celery
from celery_sqs_backoff import SQSBackoffTask

app = Celery("refused", broker="memory://", set_as_current=False)
app.conf.sqs_backoff = {"store": os.environ["STORE"]}

@app.task(base=SQSBackoffTask, shared=False)
def mail(): ...
"""


@cases(
    "store pool why",
    {
        "bad URL": ("redis://:hunter2/x@host:6379/0", "solo", "percent-encoded"),
        "no region": ("dynamodb://table", "solo", "region="),
        "memory in prefork": ("memory://", "prefork", "prefork"),
        "no such user": ("redis://u:hunter2@127.0.0.1:6379/0", "solo", "rights"),
    },
)
def test_wrong_store(tmp_path, store, pool, why):
    """A worker with a store that can never work ends with an error, without a traceback."""
    (tmp_path / "refused.py").write_text(MODULE)
    env = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    env |= {
        "STORE": store.format(port=free_port()),
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "refused", "worker", "-P", pool, "-c", "1"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert why in said
    assert "Error: " in said
    assert "Traceback" not in said
    assert "hunter2" not in said

"""What is no task of this worker's is never deleted, never quoted, and a dead letter in the end."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import pytest

from celery_sqs_backoff import SQSBackoffTask
from tests.support.processes import eventually
from tests.support.record import note

from .stage import Stage, app_of_this_module

app = app_of_this_module()


@app.task(base=SQSBackoffTask, name="bad_input.works")
def works() -> None:
    note(task="bad_input.works")


def envelope(headers: dict[str, object], body: str, content_type: str = "application/json") -> str:
    return json.dumps(
        {
            "body": base64.b64encode(body.encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": content_type,
            "headers": headers,
            "properties": {
                "body_encoding": "base64",
                "delivery_tag": "t",
                "delivery_info": {"exchange": "", "routing_key": "q"},
            },
        }
    )


SECRET = "attack at dawn"
TASK: dict[str, object] = {"lang": "py", "task": "bad_input.works", "id": "i"}
NO_ARGS = "[[], {}, null]"
BAD = {
    "not-base64-not-json": SECRET,
    "json-but-no-envelope": json.dumps({"note": SECRET}),
    "json-list": json.dumps([SECRET]),
    "no-headers": envelope({}, json.dumps(SECRET)),
    "unknown-task": envelope(TASK | {"task": "of.tomorrow"}, json.dumps([[SECRET], {}, {}])),
    "undecodable": envelope(TASK, f"{{{SECRET}"),
    "pickle": envelope(TASK, SECRET, "application/x-python-serialize"),
}
HALF_A_TASK: dict[str, dict[str, object]] = {
    "no-id": {"lang": "py", "task": "bad_input.works"},
    "retries-is-text": TASK | {"retries": "many"},
    "timelimit-is-a-number": TASK | {"timelimit": 3},
    "expires-is-a-list": TASK | {"expires": [1]},
    "id-is-a-dict": TASK | {"id": {}},
    "task-is-a-list": TASK | {"task": ["a"]},
    "compression-is-unknown": TASK | {"compression": "nosuch"},
    "compression-is-a-list": TASK | {"compression": [1]},
}
WHOLE = json.loads(envelope(TASK, NO_ARGS))
#: The fields of protocol 1 are those of the headers, but in the body.
PROTOCOL_1 = {"task": "bad_input.works", "id": "i", "args": [], "kwargs": {}}
POISON = [
    *(envelope(headers, NO_ARGS) for headers in HALF_A_TASK.values()),
    *(
        json.dumps(WHOLE | {where: wrong})
        for where in ("headers", "properties")
        for wrong in ([1], "abc", 5)
    ),
    *(
        json.dumps(WHOLE | {"properties": WHOLE["properties"] | {"delivery_info": wrong}})
        for wrong in ([1], "abc", 5)
    ),
    *(
        envelope({}, json.dumps(PROTOCOL_1 | wrong))
        for wrong in ({"shadow": ["a"]}, {"shadow": {}}, {"id": [1]}, {"timelimit": "soon"})
    ),
    json.dumps(WHOLE | {"body": 5}),
    json.dumps(WHOLE | {"body": "abc"}),
    json.dumps(WHOLE | {"content-type": [1]}),
    '{"headers": {"__type__": "datetime", "__value__": 5}}',
    "[" * 5000,
]


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_bad_input_is_a_dead_letter_at_its_last_receive_and_work_goes_on(
    make_stage: Callable[..., Stage], pool: str
) -> None:
    stage = make_stage(queues={"test": {"max_receive_count": 1}})
    for body in BAD.values():
        stage.sqs.send_message(QueueUrl=stage.queues[0].url, MessageBody=body)
    with stage.worker(pool=pool, concurrency=1) as worker:
        for _ in range(3):
            stage.send("bad_input.works")
        eventually(lambda: len(stage.runs("bad_input.works")) == 3, timeout=20)
        stage.wait_until_settled(timeout=20)
        assert worker.is_running
        log = worker.log()
    letters = stage.dead_letters()
    assert sorted(letter.body for letter in letters) == sorted(BAD.values())
    assert all(letter.record and "not understood" in letter.record["reason"] for letter in letters)
    assert log.count("sqs_backoff.not_understood") == len(BAD)
    assert SECRET not in log
    assert base64.b64encode(SECRET.encode()).decode()[:12] not in log


def test_before_its_last_receive_bad_input_is_hidden_for_a_while(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(queues={"test": {"max_receive_count": 3}})
    stage.sqs.send_message(QueueUrl=stage.queues[0].url, MessageBody=BAD["unknown-task"])
    with stage.worker(pool="threads"):
        eventually(lambda: stage.delays_asked(), timeout=20)
        assert all(1 <= delay <= 8 for delay in stage.delays_asked())
    assert stage.asked("DeleteMessageBatch") == []
    assert stage.dead_letters() == []


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_poison_does_not_end_the_worker(make_stage: Callable[..., Stage], pool: str) -> None:
    """It would end every worker that receives it, one after the other."""
    stage = make_stage(queues={"test": {"max_receive_count": 1}})
    for body in POISON:
        stage.sqs.send_message(QueueUrl=stage.queues[0].url, MessageBody=body)
    with stage.worker(pool=pool, concurrency=1) as worker:
        stage.send("bad_input.works")
        eventually(
            lambda: not worker.is_running or stage.messages() == (0, 0),
            timeout=20,
            message="not settled",
        )
        assert worker.is_running
        assert len(stage.runs("bad_input.works")) == 1
    kept = {letter.body for letter in stage.dead_letters()}
    assert [body for body in POISON if body not in kept] == []

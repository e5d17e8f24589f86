"""Messages that a worker cannot run as a task, sent by mistake or to harm the worker."""

from __future__ import annotations

import base64
import json

#: The task that the headers name. The test module that sends these messages defines it.
TASK_NAME = "succeeds"

SECRET = "attack at dawn"


def envelope(headers: dict[str, object], body: str, content_type: str = "application/json") -> str:
    """Return the text of an SQS message as kombu writes it, with these headers and this body."""
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


_TASK: dict[str, object] = {"lang": "py", "task": TASK_NAME, "id": "i"}
_NO_ARGS = "[[], {}, null]"

#: Messages that a person may send by mistake.
BAD = {
    "not-base64-not-json": SECRET,
    "json-but-no-envelope": json.dumps({"note": SECRET}),
    "json-list": json.dumps([SECRET]),
    "no-headers": envelope({}, json.dumps(SECRET)),
    "unknown-task": envelope(_TASK | {"task": "of.tomorrow"}, json.dumps([[SECRET], {}, {}])),
    "undecodable": envelope(_TASK, f"{{{SECRET}"),
    "pickle": envelope(_TASK, SECRET, "application/x-python-serialize"),
}

_HALF_A_TASK: dict[str, dict[str, object]] = {
    "no-id": {"lang": "py", "task": TASK_NAME},
    "retries-is-text": _TASK | {"retries": "many"},
    "timelimit-is-a-number": _TASK | {"timelimit": 3},
    "timelimit-is-no-time": _TASK | {"timelimit": ["a", "b"]},
    "expires-is-a-list": _TASK | {"expires": [1]},
    "id-is-a-dict": _TASK | {"id": {}},
    "task-is-a-list": _TASK | {"task": ["a"]},
    "compression-is-unknown": _TASK | {"compression": "nosuch"},
    "compression-is-a-list": _TASK | {"compression": [1]},
}
_WHOLE = json.loads(envelope(_TASK, _NO_ARGS))
#: Version 1 of Celery's message protocol has these fields in the body. Version 2 has them in the
#: headers.
_PROTOCOL_1 = {"task": TASK_NAME, "id": "i", "args": [], "kwargs": {}}

#: Messages on which Celery or kombu raises an exception that would end a stock worker.
POISON = [
    *(envelope(headers, _NO_ARGS) for headers in _HALF_A_TASK.values()),
    *(
        json.dumps(_WHOLE | {where: wrong})
        for where in ("headers", "properties")
        for wrong in ([1], "abc", 5)
    ),
    *(
        json.dumps(_WHOLE | {"properties": _WHOLE["properties"] | {"delivery_info": wrong}})
        for wrong in ([1], "abc", 5)
    ),
    *(
        envelope({}, json.dumps(_PROTOCOL_1 | wrong))
        for wrong in ({"shadow": ["a"]}, {"shadow": {}}, {"id": [1]}, {"timelimit": "soon"})
    ),
    json.dumps(_WHOLE | {"body": 5}),
    json.dumps(_WHOLE | {"body": "abc"}),
    json.dumps(_WHOLE | {"content-type": [1]}),
    '{"headers": {"__type__": "datetime", "__value__": 5}}',
    "[" * 5000,
]

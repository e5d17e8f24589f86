"""Run many tasks while calls to SQS fail and workers are killed: ``python -m tests.chaos --help``.

No message may be lost. If a task runs again after its message was settled, a kill or a failed call
must explain it.
"""

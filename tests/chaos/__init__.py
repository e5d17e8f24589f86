"""Chaos: many tasks, a faulty SQS, and workers that are killed. ``python -m tests.chaos --help``.

Nothing may be lost, and whatever ran again after it had succeeded must have a reason that was
injected: a kill, or a call to SQS that was spoiled.
"""

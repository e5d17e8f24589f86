"""Any sequence of what can happen to leases, on a strict SQS: nothing lost, nothing out of turn.

Two workers share a queue. Hypothesis sends, receives, ends runs in all ways, lets time pass, stalls
and kills workers, and makes calls fail before or after they had their effect. What must hold is in
``tests/support/fake_sqs_world.py``.

``LEASE_MACHINE_EXAMPLES=2000`` looks longer, and at other sequences each time; ``make
simulate-faults`` does so.
"""

from __future__ import annotations

import os

from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ..support.fake_sqs import Fault
from ..support.fake_sqs_world import World

MAX_IN_FLIGHT = 12
MAX_MESSAGES = 30
ACTIONS = ["ChangeMessageVisibilityBatch", "DeleteMessageBatch", "SendMessageBatch"]

workers = st.integers(0, 1)
which = st.integers(0, 9)
endings = st.sampled_from(["success", "failure", "give up", "cancelled"])
delays = st.sampled_from([1.0, 25.0, 700.0, 3_600.0, 80_000.0])
actions = st.sampled_from(ACTIONS)
errors = st.sampled_from(
    [
        "InternalError",
        "RequestThrottled",
        "AccessDenied",
        EndpointConnectionError(endpoint_url="x"),
        ReadTimeoutError(endpoint_url="x"),
    ]
)


failed_calls = st.builds(Fault, actions, errors, after=st.booleans())
failed_entries = st.builds(
    Fault,
    actions,
    st.just("InternalError"),
    entries=st.frozensets(st.integers(0, 3), min_size=1),
)


def nothing(action, bodies):
    pass


class LeaseMachine(RuleBasedStateMachine):
    @initialize(
        fifo=st.booleans(),
        visibility_timeout=st.sampled_from([30, 2, 600]),
        max_receive_count=st.sampled_from([1_000, 4]),
        stale_handles_delete=st.booleans(),
    )
    def start(self, fifo, visibility_timeout, max_receive_count, stale_handles_delete):
        self.world = World(
            fifo=fifo,
            visibility_timeout=visibility_timeout,
            max_receive_count=max_receive_count,
            max_in_flight=MAX_IN_FLIGHT,
        )
        self.world.queue.stale_handles_delete = stale_handles_delete

    @precondition(lambda self: len(self.world.fates) < MAX_MESSAGES)
    @rule(group=st.sampled_from("ab"), count=st.sampled_from([1, 2, 4, 12]))
    def send(self, group, count):
        for _ in range(count):
            self.world.send(group)

    @rule(worker=workers, limit=st.sampled_from([10, 3, 1]))
    def receive(self, worker, limit):
        self.world.workers[worker].receive(limit)

    @precondition(lambda self: self.running())
    @rule(which=which, how=endings, delay=delays)
    def end_a_run(self, which, how, delay):
        worker, lease = self.running()[which % len(self.running())]
        worker.end(lease, how, delay)

    @precondition(lambda self: self.running())
    @rule(how=endings, delay=delays)
    def end_a_run_during_a_renewal(self, how, delay):
        """The race that the fence is for: a renewal is on its way when the task ends."""

        def during(action, bodies):
            for worker, lease in self.running():
                if action == "ChangeMessageVisibilityBatch" and lease.body in bodies:
                    self.world.sqs.during_call = nothing
                    worker.end(lease, how, delay)
                    return

        self.world.sqs.during_call = during
        self.world.pass_time(self.world.attributes.visibility_timeout_seconds / 2)
        self.world.sqs.during_call = nothing

    @precondition(lambda self: self.running())
    @rule(which=which, how=endings, delay=delays, error=errors, after=st.booleans())
    def end_a_run_that_sqs_does_not_hear_of(self, which, how, delay, error, after):
        worker, lease = self.running()[which % len(self.running())]
        worker.end(lease, how, delay)
        self.world.sqs.faults += [Fault(action, error, after=after) for action in ACTIONS]

    def running(self):
        return [(worker, lease) for worker in self.world.workers for lease in worker.running]

    @rule(seconds=st.sampled_from([0.1, 1.0, 12.0, 40.0, 700.0, 20_000.0, 44_000.0]))
    def pass_time(self, seconds):
        """Hours only where renewals are few."""
        is_long = self.world.attributes.visibility_timeout_seconds == 600
        self.world.pass_time(seconds if is_long else min(seconds, 700))

    @rule(worker=workers, seconds=st.sampled_from([5.0, 35.0, 700.0]), receives=workers)
    def stall(self, worker, seconds, receives):
        """What it holds becomes visible, and is received by it or by the other."""
        self.world.pass_time(seconds, stalled=self.world.workers[worker])
        self.world.workers[receives].receive(10)

    @rule(worker=workers, how=st.sampled_from([World.crash, World.shut_down]))
    def end_a_worker(self, worker, how):
        how(self.world, self.world.workers[worker])

    @rule(fault=st.one_of(failed_calls, failed_entries), times=st.integers(1, 3))
    def fail_calls(self, fault, times):
        self.world.sqs.faults += [fault] * times

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "world"):
            self.world.judge()
            assert self.world.wrong == []

    def teardown(self):
        if not hasattr(self, "world"):
            return
        try:
            self.world.drain()
            assert self.world.wrong == []
        finally:
            self.world.close()


EXAMPLES = os.environ.get("LEASE_MACHINE_EXAMPLES")

LeaseMachine.TestCase.settings = settings(
    max_examples=int(EXAMPLES or 150),
    stateful_step_count=40,
    derandomize=EXAMPLES is None,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestLeases = LeaseMachine.TestCase

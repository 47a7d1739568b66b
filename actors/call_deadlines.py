"""Deadlines of calls that rightly wait for other parts, derived from those of the parts.

Each is the longest wait that breaks no other deadline: what takes longer hangs.
"""

from opdkit.protocols.config import JobSpec

HOOKS_PER_TURN = 3
"""``on_turn_end``, ``check_finished`` and ``step``."""


def put_deadline_s(spec: JobSpec) -> float:
    """Return how long a sample may wait, in seconds, for room in the queue.

    It is due ``max_policy_lag`` steps after the one that is trained when it is drawn, and leaves
    the queue by then.
    """
    return (spec.pipeline.max_policy_lag + 1) * spec.deadlines.step_s


def trajectory_deadline_s(spec: JobSpec) -> float:
    """Return how long a trajectory may take, in seconds: its turns, its scores and its put."""
    deadlines, rollout = spec.deadlines, spec.rollout
    turn_s = deadlines.generate_s + HOOKS_PER_TURN * rollout.hook_timeout_s
    return rollout.max_turns * turn_s + deadlines.score_s + put_deadline_s(spec)


def lease_deadline_s(spec: JobSpec) -> float:
    """Return how long a lease may wait, in seconds: for a trajectory that has just begun."""
    return trajectory_deadline_s(spec)

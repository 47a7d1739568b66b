"""Which samples a step must take, so that none grows too old and none is thrown away.

A sample drawn while version v is published is due by step v + max_policy_lag. It is alive while
it rolls or lies queued; a step takes alive samples out. Let B be the samples per step,
L = max_policy_lag, slots = (L + 1) * B, s the next step to be composed, and D_h the number of
alive samples due by step s + h. A slot is held from the draw until the weights trained on the
sample are published, or until the sample dies.

**Rule.** A step takes B finished samples, earliest due first, as soon as B are finished and, for
every h in 0 … L, at least max(0, D_h - h * B) of the finished ones are due by s + h.

**Claim.** At all times D_h <= (h + 1) * B for every h >= 0. Hence no step has to take more than B
(the greatest quota is D_h - h * B <= B), and every sample is trained by its due step (the quota
of h = 0 is D_0: the step takes all that are due).

**Proof**, by induction over events; at the start nothing is alive.

1. *Draw at published version v.* Steps v … s - 1 are composed and not published, and each holds B
   slots, so at most slots - (s - v) * B = (v + L - s + 1) * B samples are alive afterwards; as
   one is, s <= v + L. The new sample is due by s + g with g = v + L - s, so D_h changes only for
   h >= g, where D_h <= number alive <= (g + 1) * B <= (h + 1) * B.
2. *Death or publication.* No D_h grows.
3. *Step s composed.* Taking the B earliest due of F_h finished ones takes min(B, F_h) of those due
   by s + h, which is at least the quota, as F_h is and as B is. So at most h * B of the D_h
   remain, and for the next step, where their horizon is h - 1, that is the claim. For h > L the
   claim follows from the one at h = L: nothing is due after v + L <= s + L.

**Progress.** If nothing can be drawn, slots are held: by a composed step, which will be trained
and published, or all by alive samples, of which there are then (L + 1) * B >= B, all finishing.

**A demand may be older than the last draw.** A sample drawn since then has the latest due step of
all, so all B taken count towards its horizon, where D_h - B <= h * B. It must be renewed after a
death, which may have been counted on, and after each lease.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from opdkit.protocols.messages import Demand


def demand(
    *,
    step: int,
    alive_by_due: Mapping[int, int],
    samples_per_step: int,
    max_policy_lag: int,
    exhausted: bool,
) -> Demand:
    """Return what the batch of ``step`` must hold.

    Args:
        step: the step to be composed; all earlier ones have their samples.
        alive_by_due: number of samples that roll or lie queued, by due step.
        samples_per_step: B.
        max_policy_lag: L.
        exhausted: nothing more will be drawn, now or later; the last batch may be smaller.

    Raises:
        ValueError: more are due than steps can take; no history of draws within the slots and
            steps by this rule leads there.
    """
    count = samples_per_step
    if exhausted:
        count = min(count, sum(alive_by_due.values()))
    quotas: list[tuple[int, int]] = []
    highest = 0
    for horizon in range(max_policy_lag + 1):
        num_due = sum(n for due, n in alive_by_due.items() if due <= step + horizon)
        quota = num_due - horizon * samples_per_step
        if quota > samples_per_step:
            raise ValueError(
                f"{num_due} samples are due by step {step + horizon}, but steps {step} to "
                f"{step + horizon} take {(horizon + 1) * samples_per_step}"
            )
        if quota > highest:
            quotas.append((step + horizon, quota))
            highest = quota
    return Demand(count=count, quotas=tuple(quotas))


def shortage(wanted: Demand, due_steps: Sequence[int]) -> int:
    """Return how many samples are missing from a batch that meets the demand.

    Of any batch that does, at most ``count - least`` are due after a quota's step. What can be
    used of the samples at hand is the largest part within these nested caps (the rank of a
    laminar matroid), found from the innermost outwards. A sample that lowers the shortage lowers
    it by one; where a sample does, any one due earlier does too.

    Args:
        wanted: with quotas increasing in both, none above ``count``.
        due_steps: [N] of the samples at hand, ascending.
    """
    num_usable = 0
    end = len(due_steps)
    for due, least in reversed(wanted.quotas):
        start = bisect_right(due_steps, due, hi=end)
        num_usable = min(wanted.count - least, num_usable + end - start)
        end = start
    return wanted.count - min(wanted.count, num_usable + end)

"""Makes k-means a step to plan: an iterative program that is no network, traced by ``olla_fx.record``.

Points are drawn at random, part by part, and then assigned to the nearest centre and summed up, part by part,
in each of a few iterations. Between two of them a part's points have the time to wait on the host.
"""

from __future__ import annotations

import torch

import olla_fx
from olla_fx.costs import DeviceProfile, Work
from olla_fx.eager.accesses import RecordedOperator
from olla_solvers.recomputation.problem import RecomputationProblem

PARTS, POINTS, FEATURES, CENTRES, ITERATIONS = 16, 16384, 64, 256, 3


def kmeans(parts: int = PARTS, points: int = POINTS, iterations: int = ITERATIONS) -> torch.Tensor:
    """Run k-means, and return the centres.

    Args:
        parts: into which the points are cut.
        points: of each part.
        iterations: of assigning and averaging.
    """
    blocks = [torch.randn(points, FEATURES) for _ in range(parts)]
    centres = blocks[0][:CENTRES].clone()
    for _ in range(iterations):
        sums, counts = torch.zeros_like(centres), torch.zeros(len(centres))
        for part in blocks:
            distances = (centres * centres).sum(1) - 2 * (part @ centres.T)
            nearest = distances.argmin(1)
            sums.index_add_(0, nearest, part)
            counts.index_add_(0, nearest, torch.ones(points))
        centres = sums / counts.clamp(min=1)[:, None]
    return centres


def kmeans_problem(profile: DeviceProfile) -> RecomputationProblem:
    """Return it with the seconds of a device.

    Args:
        profile: of the device.
    """

    def seconds(operator: RecordedOperator) -> float:
        work = Work(operator.flops, operator.dtype, operator.moved_bytes)
        return profile.seconds(operator.name, work)

    with olla_fx.record(operators=True) as recording:
        kmeans()
    return recording.program.problem(seconds)

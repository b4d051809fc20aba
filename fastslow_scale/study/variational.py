"""phi_theta(y) learns p_st(y) without ever seeing it: by minimising |Q(y) phi_theta(y)|^2 over the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fastslow_scale.study.generators import SLOW_SIZE, Array, Family, draw_slow
from fastslow_scale.study.stationary import by_null_space, group_inverse, total_variation

WIDTHS = (2, 4, 8, 16)
RESTARTS = 3
POINTS = 300
"""Points y in training, and as many others held out."""
STEPS = 100
DAMPING, MOST_DAMPING = 10.0, 1e12
"""lambda at the start, and where no step helps any more."""


@dataclass(frozen=True)
class Fit:
    """What phi_theta came to on points y that it was not trained on.

    Attributes:
        mean: total variation to p_st(y), mean over y.
        worst: the same, largest over y.
        identity: largest entry of (phi - p_st) - Q^# Q phi over y, zero but for rounding.
    """

    mean: float
    worst: float
    identity: float


class Phi(nn.Module):
    """phi_theta(y) = softmax(down silu(up y + b) + c): one hidden layer, as in the network's phi, then the simplex.

    On the simplex |Q phi|^2 is zero only at p_st. Off it phi = 0 would do as well.
    """

    def __init__(self, width: int, states: int, draws: torch.Generator):
        super().__init__()
        self.up = nn.Linear(SLOW_SIZE, width, dtype=torch.float64)
        self.down = nn.Linear(width, states, dtype=torch.float64)
        with torch.no_grad():
            for layer in (self.up, self.down):
                layer.weight.normal_(0.0, 1.0 / math.sqrt(layer.in_features), generator=draws)
                layer.bias.normal_(0.0, 1.0, generator=draws)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """[N, m] -> [N, n], rows on the simplex."""
        return torch.softmax(self.down(F.silu(self.up(y))), dim=-1)


def train_phi(family: Family, y: Array, width: int, seed: int, steps: int = STEPS) -> Phi:
    """Minimise the mean over y [N, m] of |Q(y) phi(y)|^2, a least-squares problem, by Levenberg and Marquardt's method.

    With r [N n] the residuals Q phi at all points and J their derivative by the weights, a step d solves
    (JᵀJ + lambda I) d = -Jᵀr; it is taken if it lowers |r|^2. (Marquardt, J. SIAM 11, 431, 1963. First-order methods
    stop far above what a width can do: Qᵀ Q is badly conditioned, and then what is seen is the method, not the width.)
    """
    phi = Phi(width, family.states, torch.Generator().manual_seed(seed))
    points, generators = torch.from_numpy(y), torch.from_numpy(family.generator(y))
    shapes = {name: weight.shape for name, weight in phi.named_parameters()}

    def residual(weights: torch.Tensor, point: torch.Tensor, generator: torch.Tensor) -> torch.Tensor:
        """Q phi at one point: [weights], [m] and [n, n] -> [n]."""
        parts = weights.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        return generator @ functional_call(phi, named, (point,))

    residuals = vmap(residual, in_dims=(None, 0, 0))
    derivatives = vmap(jacrev(residual), in_dims=(None, 0, 0))
    weights = parameters_to_vector(phi.parameters()).detach()
    with torch.no_grad():
        r, damping = residuals(weights, points, generators).flatten(), DAMPING
        for _ in range(steps):
            j = derivatives(weights, points, generators).flatten(end_dim=1)
            square, downhill = j.T @ j, -(j.T @ r)
            while damping < MOST_DAMPING:
                proposed = weights + torch.linalg.solve(square + damping * torch.eye(len(weights)), downhill)
                proposed_r = residuals(proposed, points, generators).flatten()
                if proposed_r.square().sum() < r.square().sum():
                    weights, r, damping = proposed, proposed_r, damping / 4
                    break
                damping *= 4
        vector_to_parameters(weights, phi.parameters())
    return phi


def judge(family: Family, phi: Phi, y: Array) -> Fit:
    """Against p_st at y [N, m], which is used nowhere else.

    Since Q^# Q = I - p_st 1ᵀ and 1ᵀphi = 1, phi - p_st = Q^# Q phi: |phi - p_st| <= |Q^#| |Q phi|. A small functional
    means a small error as long as Q^# is not large, that is, as long as the gap is not small.
    """
    with torch.no_grad():
        learned = phi(torch.from_numpy(y)).numpy()
    generators = family.generator(y)
    stationary = by_null_space(generators)
    through_inverse = np.einsum("bij,bjk,bk->bi", group_inverse(generators, stationary), generators, learned)
    errors = total_variation(learned, stationary)
    identity = np.abs(learned - stationary - through_inverse).max()
    return Fit(float(errors.mean()), float(errors.max()), float(identity))


def fits_by_width(family: Family, rng: np.random.Generator, widths: tuple[int, ...] = WIDTHS) -> dict[int, list[Fit]]:
    """For each width, RESTARTS networks from different initial weights; the same points for all."""
    seen, held_out = draw_slow(POINTS, rng), draw_slow(POINTS, rng)
    seeds = rng.integers(2**31, size=RESTARTS)
    return {
        width: [judge(family, train_phi(family, seen, width, int(seed)), held_out) for seed in seeds]
        for width in widths
    }

"""Random generators Q(y) of Markov jump processes whose rates depend on a slow variable y.

Convention: dx/dt = Q x with x a column of probabilities. Q[i, j] >= 0 is the rate of jumps from j to i (i != j), and
each column sums to zero: 1ᵀQ = 0, so 1ᵀx is conserved. (Books on Markov chains often use rows: their Q is this Qᵀ.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

Array = NDArray[np.float64]
Kind = Literal["reversible", "non-reversible", "one-way ring"]
KINDS: tuple[Kind, ...] = ("reversible", "non-reversible", "one-way ring")

SLOW_SIZE = 2
"""m: the slow variable is a point of the plane."""

RADIUS = 1.2
"""The slow flow never leaves the disc |y| <= RADIUS (see `slow_fast.SlowFlow`); y is drawn from it elsewhere too."""

GAP = 2.0
"""Rates are scaled so that the smallest gap over the disc is this: the slowest fast mode decays like exp(-GAP t / eps),
and eps compares the fast time with the slow one, whose circulation has angular velocity 1."""

WAVES = 3


@dataclass(frozen=True)
class Family:
    """log Q[i, j](y) = base[i, j] + sum_k sway[i, j, k] sin(waves[k] . y + phases[k])    (i != j)

    Rates are bounded above and away from zero for all y. So which jumps are possible does not depend on y, and neither
    does irreducibility; over a bounded set of y the gap stays away from zero.

    Attributes:
        kind: what the rates obey at every y.
        base: [n, n], -inf where no jump is possible; the diagonal is not used.
        sway: [n, n, K].
        waves: [K, m].
        phases: [K], radians.
    """

    kind: Kind
    base: Array
    sway: Array
    waves: Array
    phases: Array

    @property
    def states(self) -> int:
        """n, the number of fast states."""
        return len(self.base)

    def generator(self, y: Array) -> Array:
        """Q(y): [..., m] -> [..., n, n]."""
        return _with_diagonal(self._rates(np.sin(y @ self.waves.T + self.phases)))

    def derivative(self, y: Array) -> Array:
        """dQ/dy_l: [..., m] -> [..., m, n, n]. dQ[i, j]/dy_l = Q[i, j] sum_k sway[i, j, k] cos(.) waves[k, l]."""
        angles = y @ self.waves.T + self.phases
        slopes = np.moveaxis(self.sway @ (np.cos(angles)[..., None, :, None] * self.waves), -1, -3)
        return _with_diagonal(self._rates(np.sin(angles))[..., None, :, :] * slopes)

    def _rates(self, sines: Array) -> Array:
        """[..., K] -> [..., n, n], the diagonal not yet right."""
        sways = sines @ self.sway.reshape(-1, len(self.waves)).T
        return np.asarray(np.exp(self.base + sways.reshape(*sines.shape[:-1], self.states, self.states)))

    def bridged(self, strength: float) -> Family:
        """The rates between the first n // 2 states and the others times `strength`; 0 cuts the states in two."""
        first = np.arange(self.states) < self.states // 2
        between = first[:, None] != first[None, :]
        with np.errstate(divide="ignore"):
            return replace(self, base=np.where(between, self.base + np.log(strength), self.base))


def draw_family(kind: Kind, states: int, rng: np.random.Generator) -> Family:
    """A random irreducible family with gap at least GAP over the disc.

    reversible: Q[i, j] = S[i, j] exp((E[j] - E[i]) / 2), S symmetric, so that Q[i, j] exp(-E[j]) is symmetric too
    (detailed balance). non-reversible: all rates independent. one-way ring: only jumps from j to j + 1 mod n, so that
    probability runs round in the stationary state and eigenvalues are complex.
    """

    def logs(width: float, *shape: int) -> Array:
        """The whole of one coefficient of the log-rates over all pairs of states, [n, n, *shape]."""
        if kind != "reversible":
            return rng.normal(0.0, width, (states, states, *shape))
        pairs, energies = rng.normal(0.0, width, (states, states, *shape)), rng.normal(0.0, width, (states, *shape))
        return (pairs + pairs.swapaxes(0, 1)) / 2 + (energies[None, :] - energies[:, None]) / 2

    base, sway = logs(0.5), logs(0.4, WAVES)
    if kind == "one-way ring":
        allowed = np.roll(np.eye(states, dtype=bool), 1, axis=0)
        base, sway = np.where(allowed, base, -np.inf), np.where(allowed[..., None], sway, 0.0)
    angles = rng.uniform(0.0, 2 * np.pi, WAVES)
    waves = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    family = Family(kind, base, sway, waves, rng.uniform(0.0, 2 * np.pi, WAVES))
    return replace(family, base=base + np.log(GAP / smallest_gap(family)))


def draw_slow(count: int, rng: np.random.Generator) -> Array:
    """Points drawn evenly from the disc |y| <= RADIUS: [count, m]."""
    radius, angle = RADIUS * np.sqrt(rng.uniform(size=count)), rng.uniform(0.0, 2 * np.pi, count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def gap(generator: Array) -> Array:
    """Decay rate of the slowest mode, -Re of the second eigenvalue: [..., n, n] -> [...]. Zero without a unique p_st.

    The eigenvalue zero is simple for an irreducible generator and all others have negative real parts (Perron and
    Frobenius; Seneta, Non-negative Matrices and Markov Chains, 2006, chapters 1 and 2).
    """
    return np.asarray(-np.sort(np.linalg.eigvals(generator).real, axis=-1)[..., -2])


def smallest_gap(family: Family) -> float:
    """The smallest gap on a grid over the disc: 20 radii, 40 directions."""
    radius, angle = np.meshgrid(np.linspace(0.0, RADIUS, 20), np.linspace(0.0, 2 * np.pi, 40, endpoint=False))
    y = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return float(gap(family.generator(y)).min())


def closed_classes(generator: Array) -> list[list[int]]:
    """The sets of states that are never left and whose members reach each other: [n, n] -> their states.

    p_st is unique if and only if there is exactly one; irreducible means that it holds all states (Norris, Markov
    Chains, 1997, sections 1.2 and 3.2).
    """
    jumps = (generator > 0) & ~np.eye(len(generator), dtype=bool)
    count, label = connected_components(jumps.T, directed=True, connection="strong")
    classes = [np.flatnonzero(label == one) for one in range(count)]
    return sorted(states.tolist() for states in classes if not jumps[np.ix_(label != label[states[0]], states)].any())


def circulation(generator: Array, stationary: Array) -> float:
    """How far from detailed balance: largest net flow over largest flow, [n, n] and [n] -> 0 (reversible) to 1.

    The flow from j to i is Q[i, j] p[j]. Detailed balance: it equals the flow back (Kelly, Reversibility and
    Stochastic Networks, 1979, section 1.2).
    """
    flow = np.where(np.eye(len(stationary), dtype=bool), 0.0, generator * stationary)
    return float(np.abs(flow - flow.T).max() / flow.max())


def _with_diagonal(rates: Array) -> Array:
    """Overwrite the diagonal by what makes each column sum to zero."""
    diagonal = np.einsum("...ii->...i", rates)  # a view
    diagonal[...] = 0.0
    diagonal[...] = -rates.sum(axis=-2)
    return rates

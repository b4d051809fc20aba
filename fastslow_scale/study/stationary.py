"""The stationary distribution p_st of a generator, three ways, and the group inverse that tells how it moves.

Q p_st = 0,  1ᵀp_st = 1  (columns of Q sum to zero, see `generators`).
"""

from __future__ import annotations

import numpy as np
from scipy.integrate import solve_ivp

from fastslow_scale.study.generators import Array, closed_classes, gap

SINGULAR = 1e-13
"""Relative to the largest: what is below counts as zero."""


class NotUnique(ValueError):
    """The generator has several stationary distributions; the message says by which sign that was seen."""


def by_null_space(generator: Array) -> Array:
    """The right singular vector of the singular value zero, scaled to sum 1: [..., n, n] -> [..., n].

    Raises:
        NotUnique: a second singular value is zero.
    """
    _, sizes, rows = np.linalg.svd(generator)
    if (sizes[..., -2] <= SINGULAR * sizes[..., 0]).any():
        raise NotUnique("two singular values are zero: the null space has more than one dimension")
    vector = rows[..., -1, :]
    return np.asarray(vector / vector.sum(axis=-1, keepdims=True))


def by_trees(generator: Array) -> Array:
    """Kirchhoff: p[i] is in proportion to the weight of all spanning trees that lead to i, [n, n] -> [n].

    A tree's weight is the product of its rates. By the matrix-tree theorem the sum over all trees with root i is the
    determinant of -Q without row and column i (Tutte 1948; Schnakenberg, Rev. Mod. Phys. 48, 571, 1976).

    Raises:
        NotUnique: no spanning tree exists.
    """
    n = len(generator)
    scaled = -generator / np.abs(generator).max()
    others = [np.delete(np.arange(n), i) for i in range(n)]
    trees = np.array([np.linalg.det(scaled[np.ix_(rest, rest)]) for rest in others])
    if trees.max() <= SINGULAR:
        raise NotUnique("no state has a spanning tree that leads to it")
    return np.asarray(trees / trees.sum())


def by_integration(generator: Array, start: Array) -> Array:
    """Where dx/dt = Q x is after 60 / gap, when exp(-60) of the start is left: [n, n] and [n] -> [n].

    Raises:
        NotUnique: there are several closed classes, so that the end would depend on the start.
    """
    classes = closed_classes(generator)
    if len(classes) > 1:
        raise NotUnique(f"there are {len(classes)} closed classes, {classes}: the end depends on the start")
    return relax(generator, start, 60.0 / float(gap(generator)))


def relax(generator: Array, start: Array, duration: float) -> Array:
    """x(duration) for dx/dt = Q x, x(0) = start: [n, n] and [n] -> [n].

    Correct to about 1e-8 on the way. At the end of a long way far better: implicit steps keep 1ᵀx and stand still where
    Q x = 0, so their errors die out together with the start.
    """
    solved = solve_ivp(
        lambda _, x: generator @ x, (0.0, duration), start, method="Radau", jac=generator, rtol=1e-8, atol=1e-12
    )
    return np.asarray(solved.y[:, -1])


def group_inverse(generator: Array, stationary: Array) -> Array:
    """Q^#, the X with Q X Q = Q, X Q X = X, Q X = X Q: [..., n, n] and [..., n] -> [..., n, n].

    With the projector Pi = p_st 1ᵀ (Q Pi = Pi Q = 0) it is the inverse of Q on vectors of sum zero and zero on p_st:
    Q Q^# = I - Pi. So (Q + Pi)(Q^# + Pi) = I, that is Q^# = (Q + Pi)^-1 - Pi. Its eigenvalues are zero and 1/lambda
    for each eigenvalue lambda of Q, hence negative. (Meyer, SIAM Review 17, 443, 1975, writes A = I - P and has the
    other sign; Campbell and Meyer, Generalized Inverses of Linear Transformations, chapters 7 and 8.)

    The Moore-Penrose inverse is another matrix: it projects at right angles, not along p_st, so it does not commute
    with Q unless p_st is uniform.
    """
    projector = np.repeat(stationary[..., :, None], stationary.shape[-1], axis=-1)
    return np.asarray(np.linalg.inv(generator + projector) - projector)


def movement(inverse: Array, derivative: Array, stationary: Array) -> Array:
    """dp_st/dy_l = -Q^# (dQ/dy_l) p_st: [..., n, n], [..., m, n, n] and [..., n] -> [..., m, n].

    From Q p_st = 0: (dQ/dy) p_st + Q (dp_st/dy) = 0. Q^# from the left gives (I - Pi) dp_st/dy = dp_st/dy, since
    1ᵀ dp_st/dy = 0 (Golub and Meyer, SIAM J. Alg. Disc. Meth. 7, 273, 1986).
    """
    return np.asarray(-np.einsum("...ij,...ljk,...k->...li", inverse, derivative, stationary))


def two_states(there: float, back: float) -> tuple[Array, Array, Array]:
    """Two states in closed form, rates `there` (0 to 1) and `back` (1 to 0): Q [2, 2], p_st [2], Q^# [2, 2].

    p_st = (back, there) / s and the gap is s = there + back. Q^2 = -s Q, so Q^# = Q / s^2.
    """
    total = there + back
    generator = np.array([[-there, back], [there, -back]])
    return generator, np.array([back, there]) / total, generator / total**2


def total_variation(p: Array, q: Array) -> Array:
    """Half the 1-norm of the difference, the largest difference in the probability of any event: [..., n] -> [...]."""
    return np.asarray(np.abs(p - q).sum(axis=-1) / 2)

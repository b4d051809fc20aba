"""The stiff system eps dx/dt = Q(y) x, dy/dt = g(x, y), and how far its fast part is from the slow manifold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.integrate import solve_ivp

from fastslow_scale.study.generators import SLOW_SIZE, Array, Family
from fastslow_scale.study.stationary import by_null_space, group_inverse, movement, total_variation

EPSILONS = tuple(2.0**-k for k in range(2, 10))
"""1/4 ... 1/512: as a pool of 4 to 512 tokens would have it."""

LAYER, END = 2.0, 5.0
"""Slow times between which distances count. At the largest eps and the smallest gap what the start leaves behind is
exp(-GAP * LAYER / eps) = exp(-16) = 1e-7 of it at LAYER, far below eps^2; at smaller eps less."""

RTOL, ATOL, MAX_STEP = 1e-9, 1e-11, 0.05
"""The distance to the first-order manifold is about 1e-6 at eps = 1/512; the solver's error must not show in it.
MAX_STEP, in slow time, keeps the steps close enough for the largest distance not to fall between two of them."""

TURN = np.array([[0.0, -1.0], [1.0, 0.0]])


@dataclass(frozen=True)
class SlowFlow:
    """g(x, y) = (1 - |y|^2) y + J y + C x, J the quarter turn: y circulates with |y| near 1, and x pushes it about.

    x is a probability vector, so |C x| <= the largest column norm of C, PUSH. Where |y|^3 - |y| > PUSH the flow points
    inwards: y stays in the disc |y| <= 1.2 (1.2^3 - 1.2 = 0.53).

    Attributes:
        push: C, [m, n].
    """

    PUSH = 0.3
    push: Array

    def __call__(self, x: Array, y: Array) -> Array:
        """g: [..., n] and [..., m] -> [..., m]."""
        size = (y**2).sum(axis=-1, keepdims=True)
        return np.asarray((1.0 - size) * y + y @ TURN.T + x @ self.push.T)

    def by_slow(self, y: Array) -> Array:
        """dg/dy = (1 - |y|^2) I - 2 y yᵀ + J: [m] -> [m, m]."""
        return np.asarray((1.0 - y @ y) * np.eye(SLOW_SIZE) - 2.0 * np.outer(y, y) + TURN)


@dataclass(frozen=True)
class System:
    """A family of generators and the flow of its slow variable."""

    family: Family
    flow: SlowFlow

    def slopes(self, state: Array, eps: float) -> Array:
        """d(x, y)/dt in slow time: [n + m] -> [n + m]."""
        x, y = state[:-SLOW_SIZE], state[-SLOW_SIZE:]
        return np.concatenate([self.family.generator(y) @ x / eps, self.flow(x, y)])

    def jacobian(self, state: Array, eps: float) -> Array:
        """Of `slopes`: [n + m] -> [n + m, n + m]."""
        x, y = state[:-SLOW_SIZE], state[-SLOW_SIZE:]
        by_slow = (self.family.derivative(y) @ x).T
        return np.block([[self.family.generator(y) / eps, by_slow / eps], [self.flow.push, self.flow.by_slow(y)]])


@dataclass(frozen=True)
class Trajectory:
    """A solution at the solver's own steps (its interpolation between them is less exact than they are).

    Attributes:
        time: [steps], slow time.
        x: [steps, n]; y: [steps, m].
    """

    time: Array
    x: Array
    y: Array


@dataclass(frozen=True)
class Distances:
    """Largest total variation of x(t) from two approximations at the same y(t), LAYER <= t <= END.

    Attributes:
        zeroth: from p_st(y).
        first: from p_st(y) + eps Q^# (dp_st/dy) g(p_st, y).
    """

    zeroth: float
    first: float


@dataclass(frozen=True)
class Convergence:
    """One system at every eps in EPSILONS.

    Attributes:
        zeroth, first: the two `Distances`, each [E].
        zeroth_order, first_order: exponents of eps in them, over the whole range.
        solver_error: relative change of the smallest distance (first, at the smallest eps) with a finer tolerance.
        off_simplex: how far any x(t) is from summing to one, or below zero.
    """

    system: System
    zeroth: Array
    first: Array
    zeroth_order: float
    first_order: float
    solver_error: float
    off_simplex: float


def draw_system(family: Family, rng: np.random.Generator) -> System:
    """A family with a random push of x on y."""
    push = rng.normal(size=(SLOW_SIZE, family.states))
    return System(family, SlowFlow(SlowFlow.PUSH * push / np.linalg.norm(push, axis=0).max()))


def solve(
    system: System,
    eps: float,
    *,
    at_rest: bool = False,
    method: str = "Radau",
    rtol: float = RTOL,
) -> Trajectory:
    """From y = (1, 0) and all probability in state 0 (or, at rest, p_st) to slow time END, by a stiff solver.

    Radau: implicit Runge-Kutta of order 5; BDF: backward differences of variable order (Hairer and Wanner, Solving
    Ordinary Differential Equations II, 1996, sections IV.8 and V.1). Explicit solvers would need steps below eps.
    """
    y0 = np.eye(SLOW_SIZE)[0]
    x0 = by_null_space(system.family.generator(y0)) if at_rest else np.eye(system.family.states)[0]
    state, times, states = np.concatenate([x0, y0]), [], []
    # In two legs: LAYER is then a step of its own, so that all distances are taken over the same stretch of time.
    for leg in ((0.0, LAYER), (LAYER, END)):
        solved = solve_ivp(
            lambda _, state: system.slopes(state, eps),
            leg,
            state,
            method=method,
            jac=lambda _, state: system.jacobian(state, eps),
            rtol=rtol,
            atol=rtol * ATOL / RTOL,
            max_step=MAX_STEP,
        )
        if not solved.success:
            raise ArithmeticError(f"{method} gave up at t = {solved.t[-1]:.3g} with eps = {eps:.3g}: {solved.message}")
        times.append(solved.t)
        states.append(solved.y.T)
        state = solved.y[:, -1]
    steps = np.concatenate(states)
    return Trajectory(np.concatenate(times), steps[:, :-SLOW_SIZE], steps[:, -SLOW_SIZE:])


def slow_manifold(system: System, y: Array, eps: float) -> tuple[Array, Array]:
    """p_st(y) and p_st(y) + eps x1(y), [..., m] -> twice [..., n].

    Put x = p_st(y) + eps x1(y) + ... into eps dx/dt = Q(y) x. Order 1: Q p_st = 0. Order eps: (dp_st/dy) dy/dt = Q x1
    with dy/dt = g(p_st, y). Both 1ᵀ(dp_st/dy) = 0 and 1ᵀx1 = 0 (probability is conserved), so
    x1 = Q^# (dp_st/dy) g(p_st, y). What is left is of order eps^2 (Fenichel, J. Diff. Eq. 31, 53, 1979; Kuehn, Multiple
    Time Scale Dynamics, 2015, chapters 3 and 5; for jump processes Yin and Zhang, Continuous-Time Markov Chains and
    Applications: A Two-Time-Scale Approach, 2013, chapter 4).
    """
    generator = system.family.generator(y)
    stationary = by_null_space(generator)
    inverse = group_inverse(generator, stationary)
    moving = movement(inverse, system.family.derivative(y), stationary)
    speed = np.einsum("...li,...l->...i", moving, system.flow(stationary, y))
    return stationary, stationary + eps * np.einsum("...ij,...j->...i", inverse, speed)


def distances(system: System, path: Trajectory, eps: float) -> Distances:
    """How far the path is from both approximations once the initial layer is over."""
    late = path.time >= LAYER
    zeroth, first = slow_manifold(system, path.y[late], eps)
    x = path.x[late]
    return Distances(float(total_variation(x, zeroth).max()), float(total_variation(x, first).max()))


def order(sizes: Sequence[float], errors: Array) -> float:
    """The exponent k in error = c size^k: the slope of the least-squares line through (log size, log error)."""
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def converge(system: System) -> Convergence:
    """Solve at every eps in EPSILONS, and once more at the smallest with a tenth of the tolerance."""
    paths = [solve(system, eps) for eps in EPSILONS]
    found = [distances(system, path, eps) for path, eps in zip(paths, EPSILONS, strict=True)]
    finer = distances(system, solve(system, EPSILONS[-1], rtol=RTOL / 10), EPSILONS[-1])
    zeroth, first = (np.array(errors) for errors in zip(*((d.zeroth, d.first) for d in found), strict=True))
    return Convergence(
        system=system,
        zeroth=zeroth,
        first=first,
        zeroth_order=order(EPSILONS, zeroth),
        first_order=order(EPSILONS, first),
        solver_error=abs(finer.first / found[-1].first - 1.0),
        off_simplex=float(np.max([(np.abs(path.x.sum(axis=1) - 1.0).max(), -path.x.min()) for path in paths])),
    )

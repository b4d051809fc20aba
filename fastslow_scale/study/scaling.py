"""At what scale? The paired differences of several studies, fitted against tokens and model size.

    d = a + b log10(tokens / 1M) + c log10(parameters / 1M) + noise        one d per study and seed, nats

by ordinary least squares; intervals by Student's t with n - k degrees of freedom, k the number of terms. A term is left
out where all studies agree in it. The noise is taken to be equal at all scales. d below zero: the variant is better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import special

from data_pipeline.errors import UserError
from fastslow_scale.study.statistics import Interval

Matrix = npt.NDArray[np.float64]

TERMS = ("at 1M tokens and 1M parameters", "per tenfold tokens", "per tenfold parameters")


@dataclass(frozen=True)
class Point:
    """One paired difference, with the tokens trained on and the parameters of the baseline."""

    study: str
    tokens: int
    parameters: int
    difference: float


@dataclass(frozen=True)
class Term:
    name: str
    value: float
    interval_95: Interval


@dataclass(frozen=True)
class Fit:
    """Attributes: noise: standard deviation of what the terms do not explain, nats; freedom: n - k."""

    terms: list[Term]
    noise: float
    freedom: int
    _kept: tuple[int, ...]
    _covariance: Matrix

    def predict(self, tokens: float, parameters: float) -> tuple[float, Interval]:
        """The expected difference at another scale and its 95% interval, without a new run's own noise."""
        row = design([(tokens, parameters)])[0, list(self._kept)]
        value = float(row @ np.array([term.value for term in self.terms]))
        reach = float(special.stdtrit(self.freedom, 0.975)) * math.sqrt(float(row @ self._covariance @ row))
        return value, (value - reach, value + reach)


def fit(points: Sequence[Point]) -> Fit:
    """Raises `UserError`: fewer points than terms and one more, or all studies at one scale."""
    full = design([(point.tokens, point.parameters) for point in points])
    kept = (0, *(k for k in (1, 2) if np.ptp(full[:, k]) > 1e-9))
    if len(kept) == 1:
        raise UserError("all studies are at one scale: nothing can be fitted against tokens or model size")
    x, y = full[:, list(kept)], np.array([point.difference for point in points])
    freedom = len(y) - len(kept)
    if freedom < 1 or np.linalg.matrix_rank(x) < len(kept):
        raise UserError(
            f"{len(y)} paired differences do not determine {len(kept)} terms: add seeds, or studies at other scales "
            "(tokens and parameters must not grow in step)"
        )
    inverse = np.linalg.inv(x.T @ x)
    values = inverse @ x.T @ y
    variance = float(((y - x @ values) ** 2).sum()) / freedom
    covariance: Matrix = np.asarray(variance * inverse, dtype=np.float64)
    reach = special.stdtrit(freedom, 0.975) * np.sqrt(np.diag(covariance))
    terms = [
        Term(TERMS[k], float(value), (float(value - half), float(value + half)))
        for k, value, half in zip(kept, values, reach, strict=True)
    ]
    return Fit(terms, math.sqrt(variance), freedom, kept, covariance)


def design(scales: Sequence[tuple[float, float]]) -> Matrix:
    """Rows 1, log10(tokens / 1M), log10(parameters / 1M)."""
    return np.array([[1.0, math.log10(tokens / 1e6), math.log10(size / 1e6)] for tokens, size in scales])


def read_points(studies: Sequence[Path], variant: str, baseline: str) -> list[Point]:
    """From the report.json of each study. Raises `UserError`: none there, or without this comparison."""
    points: list[Point] = []
    paths = [study.resolve() for study in studies]
    for study in studies:
        if paths.count(study.resolve()) > 1:
            raise UserError(f"study {study} is given twice: its differences would count twice")
        path = study / "report.json" if study.is_dir() else study
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            arms, tokens = report["arms"], int(report["tokens"])
            one, other = arms[variant]["losses"], arms[baseline]["losses"]
            size = int(arms[baseline]["parameters"])
            if tokens < 1 or size < 1:
                raise ValueError("tokens and parameters must be above 0")
            points += [Point(str(study), tokens, size, a - b) for a, b in zip(one, other, strict=True)]
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}; `fastslow ablate` writes it") from None
        except KeyError as error:
            raise UserError(f"{path} has no arm or key {error}") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is damaged: {error}") from None
    return points

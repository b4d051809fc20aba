"""The figures of an ablation: loss curves, paired differences, gates, loss by position, costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastslow_scale.study.ablation import Ablation, ArmResult

Array = npt.NDArray[np.float64]


def write_figures(found: Ablation, output: Path) -> dict[str, str]:
    """Draw all that the study has numbers for; returns file names with what they show."""
    figures = {
        "losses.png": ("Training loss, mean over seeds, and its range", draw_losses(found)),
        "differences.png": ("Paired differences of the final validation loss", draw_differences(found)),
        "positions.png": ("Loss by position in the sequence, against the baseline", draw_positions(found)),
        "costs.png": ("Cost against the baseline", draw_costs(found)),
    }
    if any(run.gates for arm in found.arms.values() for run in arm.runs):
        figures["gates.png"] = ("Norm of the first gate over the tokens seen", draw_gates(found))
    for name, (_, figure) in figures.items():
        FigureCanvasAgg(figure).print_png(str(output / name))
    return {name: title for name, (title, _) in figures.items()}


def draw_losses(found: Ablation) -> Figure:
    """Left: the curves, which mostly lie on each other. Right: their difference to the baseline's."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    base_tokens, base = curves(found.baseline, "loss")
    for arm in found.arms.values():
        tokens, values = curves(arm, "loss")
        _band(left, tokens, values, arm.arm.name)
        if arm is not found.baseline and tokens.shape == base_tokens.shape:
            _band(right, tokens, values - base, arm.arm.name)
    _label(left, "tokens", "training loss, nats")
    _label(right, "tokens", f"difference to {found.study.baseline}, nats")
    right.axhline(0, color="grey", linewidth=0.8)
    return figure


def draw_differences(found: Ablation) -> Figure:
    """One row a comparison: each seed, the mean, its 95% interval, and the margin."""
    figure = Figure(figsize=(8, 1 + 0.5 * len(found.compared)), layout="constrained")
    axes = figure.subplots()
    names = []
    for row, compared in enumerate(reversed(found.compared)):
        result = compared.result
        names.append(f"{compared.variant} - {compared.baseline}")
        axes.plot(result.differences, [row] * len(result.differences), "o", color="C0", alpha=0.4, markersize=4)
        axes.plot(result.interval_95, (row, row), "-", color="C0")
        axes.plot(result.mean, row, "|", color="C3", markersize=14)
    axes.axvspan(-found.study.margin, found.study.margin, color="grey", alpha=0.2)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("nats (grey: the margin)")
    return figure


def draw_gates(found: Ablation) -> Figure:
    """Norm of the first exchange's gate."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for arm in found.arms.values():
        if arm.runs[0].gates:
            _band(axes, *curves(arm, "gate_norm"), arm.arm.name)
    _label(axes, "tokens", "norm of the first gate")
    return figure


def draw_positions(found: Ablation, parts: int = 16) -> Figure:
    """Mean difference in each sixteenth of the sequence, over seeds, with its range."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    base = by_position(found.baseline)
    places = np.array([part.mean() for part in np.array_split(np.arange(base.shape[1]), parts)])
    for arm in found.arms.values():
        if arm is not found.baseline:
            differences = np.array_split(by_position(arm) - base, parts, axis=1)
            _band(axes, places, np.stack([part.mean(axis=1) for part in differences], axis=1), arm.arm.name)
    axes.axhline(0, color="grey", linewidth=0.8)
    _label(axes, "position in the sequence", f"difference to {found.study.baseline}, nats")
    return figure


def draw_costs(found: Ablation) -> Figure:
    """Step time, FLOPs a token and parameters of each arm, over the baseline's."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    base, names = found.baseline, list(found.arms)
    ratios = {
        "step time": [found.time_ratio(name, base.arm.name) for name in names],
        "FLOPs a token": [arm.size.flops_per_token / base.size.flops_per_token for arm in found.arms.values()],
        "parameters": [arm.size.parameters / base.size.parameters for arm in found.arms.values()],
    }
    for k, (name, values) in enumerate(ratios.items()):
        axes.bar(np.arange(len(names)) + 0.25 * (k - 1), values, 0.25, label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_ylabel(f"ratio to {base.arm.name}")
    axes.legend()
    return figure


def curves(arm: ArmResult, key: str) -> tuple[Array, Array]:
    """Tokens [n] and a logged number [seeds, n], where all runs have logged it; of lists the first entry."""
    rows = []
    for run in arm.runs:
        logged = {record["tokens"]: record[key] for record in run.records if key in record and "loss" in record}
        rows.append({tokens: value[0] if isinstance(value, list) else value for tokens, value in logged.items()})
    shared = sorted(set.intersection(*(set(row) for row in rows)))
    values = [[row[tokens] for tokens in shared] for row in rows]
    return np.array(shared, dtype=np.float64), np.array(values, dtype=np.float64)


def by_position(arm: ArmResult) -> Array:
    """Held-out loss, [seeds, T]."""
    return np.array([run.measured.by_position for run in arm.runs])


def _band(axes: Axes, x: Array, rows: Array, label: str) -> None:
    (line,) = axes.plot(x, rows.mean(axis=0), label=label)
    axes.fill_between(x, rows.min(axis=0), rows.max(axis=0), color=line.get_color(), alpha=0.15, linewidth=0)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)

"""What an ablation compares: each arm is the config with a few keys changed, and all arms of a seed are paired.

Arms with the same seed start from the same fast weights and see the same batches. The two matched arms have wider fast
layers, so other weights: they share only the batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import UserError
from fastslow_scale.config import LEAK, Config
from fastslow_scale.config_file import load_config
from fastslow_scale.model.flops import count_flops

MATCHED = {"dense_matched_params": "parameters", "dense_matched_flops": "FLOPs"}
NAME = re.compile(r"[A-Za-z0-9_-]+")
RESERVED = ("sweep", "orders", "tb")
FREE_SECTIONS = ("model", "slow", "optimizer", "schedule", "parallel")
FREE_KEYS = (
    "train.dtype",
    "train.micro_batch_size",
    "train.recompute",
    "train.deterministic",
    "data.reset_at_document",
)
TRAINED = ("dense", "frozen", "frozen_slow", "coupled", "shuffled")


@dataclass(frozen=True)
class Arm:
    """One column of the study: a name, and the `section.key=value` overrides that make it."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """What an arm costs: parameters (vocabulary padding included) and training FLOPs of a token."""

    parameters: int
    flops_per_token: float


def choose_arms(
    config_path: Path | str, overrides: Sequence[str], names: Iterable[str], own: Iterable[str]
) -> list[Arm]:
    """The arms of a study: variants by name, and own ones written `NAME=VARIANT [section.key=value ...]`.

    Raises:
        UserError: an unknown variant, one that cannot be trained, a name twice, or a config that an arm makes invalid.
    """
    arms = [_variant(name, config_path, overrides) for name in names]
    for text in own:
        name, equals, rest = text.partition("=")
        variant, *changes = rest.split() or [""]
        if not equals or not NAME.fullmatch(name):
            raise UserError(f"--arm must look like 'NAME=VARIANT section.key=value ...' (got {text!r})")
        if name in RESERVED:
            raise UserError(f"--arm {name}: the study has a folder of that name already, choose another")
        for key in (change.partition("=")[0] for change in changes):
            if key == "model.variant" or not (key.split(".")[0] in FREE_SECTIONS or key in FREE_KEYS):
                raise UserError(f"--arm {name}: {key} must be the same for all arms, or runs of a seed are no pairs")
        base = _variant(variant, config_path, [*overrides, *changes])
        arms.append(Arm(name, (*changes, *base.overrides)))
    seen: set[str] = set()
    for arm in arms:
        if arm.name in seen:
            raise UserError(f"{arm.name} is named twice: each arm of a study needs a name of its own")
        seen.add(arm.name)
        load_config(config_path, [*overrides, *arm.overrides])
    return arms


def _variant(name: str, config_path: Path | str, overrides: Sequence[str]) -> Arm:
    if name in TRAINED:
        return Arm(name, (f"model.variant={name}",))
    if name in MATCHED:
        coupled = load_config(config_path, [*overrides, "model.variant=coupled"])
        inner = matched_intermediate_size(coupled, MATCHED[name])
        return Arm(name, ("model.variant=dense", f"model.intermediate_size={inner}"))
    if name == "unshifted":
        raise UserError(f"variant unshifted is not trained: {LEAK}, so its loss means nothing")
    raise UserError(f"variant {name or '(none)'} is not known: choose from {', '.join((*TRAINED, *MATCHED))}")


def matched_intermediate_size(coupled: Config, what: str) -> int:
    """The MLP width at which the dense model has as many `parameters` or `FLOPs` as the coupled one, as near as can be.

    A unit of width adds 3 D parameters a layer, and 6 D FLOPs a token and layer in the forward pass.
    """
    model, step = coupled.model, coupled.parallel.tensor_parallel_size
    dense = coupled.model_copy(update={"model": model.model_copy(update={"variant": "dense"})})
    if what == "parameters":
        lacking = float(size_of(coupled).parameters - size_of(dense).parameters)
        unit = 3.0 * model.hidden_size * model.num_hidden_layers
    else:
        lacking = size_of(coupled).flops_per_token - size_of(dense).flops_per_token
        unit = 3 * 6.0 * model.hidden_size * model.num_hidden_layers
    return model.intermediate_size + step * round(lacking / unit / step)


def size_of(config: Config) -> Size:
    """Parameters and training FLOPs of a token."""
    from fastslow_scale.model.model import count_parameters  # seconds: most arms are refused or started without it
    from fastslow_scale.parallel.mesh import single_process_mesh

    flops = count_flops(config).training / config.train.seq_length
    return Size(count_parameters(config, single_process_mesh()), flops)

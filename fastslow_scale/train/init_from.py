"""`train.init_from`: a new run that starts from the weights of another, and from nothing else of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from data_pipeline.errors import UserError
from fastslow_scale.config import Config
from fastslow_scale.parallel.mesh import Mesh
from fastslow_scale.train.agreement import Ranks
from fastslow_scale.train.checkpoint import find_together, full_shape, read_fragments
from fastslow_scale.train.checkpoint_files import locate, read_manifest
from fastslow_scale.train.checkpoint_reader import WEIGHTS, CheckpointReader
from fastslow_scale.train.run_folder import refuse_other_values
from fastslow_scale.train.zero_fragments import EngineState

EXCHANGES = "exchanges."
# With these changed, weights of the same shapes would be another function.
MUST_AGREE = {
    "model": ("vocab_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
    "slow": ("num_attention_heads", "num_key_value_heads", "pool_size", "exchange_after"),
}
# May change on purpose, for longer sequences; never without a word.
TOLD = ("rope_theta", "attention_window")


@torch.no_grad()
def load_weights(engine: Any, mesh: Mesh, config: Config, tokenizer_sha256: str) -> list[str]:
    """Give the engine the weights of `train.init_from`, at any layout. Returns what to tell. All ranks call it.

    The optimizer stays as it is. Weights of a dense run leave a coupled model's exchanges as they were initialised:
    with their gates at zero it computes the same function.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or its weights do not fit; names the weight or the key.
    """
    if config.train.init_from is None:
        return []
    ranks, source = Ranks(), config.train.init_from
    try:
        folder, which = ranks.agree(lambda: locate(source))[0]
        found = find_together(folder, which)
        if found.path is None:
            raise UserError(f"run {source} has no checkpoint yet")
        path = found.path
        ranks.agree(lambda: _require_same_function(path, config, tokenizer_sha256))
        reader, engine_state = CheckpointReader(path), EngineState(engine)
        names = ranks.agree(lambda: _fitting_weights(engine_state, reader, mesh.tp_size))[0]
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from None
    ranks.on_all(
        f"the weights of {path} were not loaded",
        lambda: read_fragments(engine_state, mesh, reader, names, (WEIGHTS,)),
    )
    engine_state.push_masters()
    passed_over = [f"passed over checkpoint {other}: {reason}" for other, reason in found.passed_over]
    theirs, ours = read_manifest(path)["state"]["config"]["model"], config.model.model_dump()
    different = [key for key in TOLD if theirs[key] != ours[key]]
    changed = [f"model.{key} was {theirs[key]} there, it is {ours[key]} here" for key in different]
    return [*passed_over, f"starting from the weights of {path}", *changed]


def _require_same_function(path: Path, config: Config, tokenizer_sha256: str) -> None:
    """Raises UserError where the weights would mean something else in this run."""
    state = read_manifest(path)["state"]
    if state["tokenizer_sha256"] != tokenizer_sha256:
        raise UserError(
            f"{path} was trained with another tokenizer than this run's data: sha256 "
            f"{state['tokenizer_sha256'][:12]} there, {tokenizer_sha256[:12]} here"
        )
    if config.model.variant == "frozen" and state["config"]["model"]["variant"] not in ("dense", "frozen"):
        raise UserError(f"{path} has gates that have learned, which model.variant=frozen would hold open")
    both_coupled = "dense" not in (state["config"]["model"]["variant"], config.model.variant)
    keys = {section: names for section, names in MUST_AGREE.items() if section != "slow" or both_coupled}
    refuse_other_values(path, state["config"], config, keys)


def _fitting_weights(engine_state: EngineState, reader: CheckpointReader, tp_size: int) -> set[str]:
    """The names of the weights to load: all, but for the exchanges where the checkpoint is a dense model's."""
    ours, theirs = set(engine_state.parameters), set(reader.names())
    if not any(name.startswith(EXCHANGES) for name in theirs):
        ours = {name for name in ours if not name.startswith(EXCHANGES)}
    for name in sorted(theirs - ours):
        raise UserError(f"{reader.path} has {name}, which this model lacks")
    for name in sorted(ours - theirs):
        raise UserError(f"{reader.path} lacks {name}")
    for name in sorted(ours):
        shape = full_shape(name, engine_state, tp_size)
        if shape != reader.shape(name):
            raise UserError(f"{name} is {reader.shape(name)} in {reader.path}, but {shape} in this model")
    return ours

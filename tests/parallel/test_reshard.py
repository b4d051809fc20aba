"""A real run taken to other layouts and back, and a new run from another's weights: through the trainer, on data."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from data_pipeline.errors import UserError
from data_pipeline.readers import Document
from data_pipeline.shards import Layout as Sharding
from data_pipeline.shards import write_data_folder
from data_pipeline.tokenizer import train_tokenizer
from fastslow_scale.config import Config
from fastslow_scale.parallel.mesh import Mesh, build_mesh, start_process_group
from fastslow_scale.train import checkpoint_files as files
from fastslow_scale.train.checkpoint_files import find_checkpoint
from fastslow_scale.train.checkpoint_reader import MOMENTS, WEIGHTS, CheckpointReader
from fastslow_scale.train.loop import Trainer, train
from tests.configs import small_config
from tests.parallel.layouts import Layout, meshes
from tests.ranks import RankFailure, run_ranks

VOCABULARY = 331  # odd: padded to 336, which 4 ranks divide
BEFORE, AFTER = 3, 5  # steps until the checkpoint, and from there on

pytestmark = pytest.mark.parallel


@dataclass(frozen=True)
class Leg:
    """Part of a run at one layout: from a checkpoint (None: from nothing, for BEFORE steps) to one in `run`."""

    run: Path
    layout: Layout
    start: Path | None = None

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / f"step_{BEFORE:08d}"


def follow(config: Config, legs: list[Leg]) -> list[dict[str, Any]]:
    """Every leg: save where it starts (after BEFORE steps), then take AFTER steps."""
    configs = [with_run(config, leg.run) for leg in legs]
    results = []
    for (own, mesh), leg in zip(
        meshes([(own, leg.layout) for own, leg in zip(configs, legs, strict=True)]), legs, strict=True
    ):
        trainer = Trainer(own, mesh)
        trainer.resume("never" if leg.start is None else str(leg.start))
        if leg.start is None:
            take_steps(trainer, BEFORE)
        assert trainer.step == BEFORE
        trainer.save()
        losses, rates, samples = take_steps(trainer, AFTER)
        trainer.saver.close()
        draws: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(draws, torch.rand(4).tolist())
        results.append({"losses": losses, "rates": rates, "samples": samples, "draws": draws})
    return results


def take_steps(trainer: Trainer, count: int) -> tuple[list[float], list[float], list[list[list[int]]]]:
    """Losses, learning rates and, in the global order, the rows of each step."""
    losses, rates, samples = [], [], []
    batches = trainer.batches()
    for _ in range(count):
        rows = next(batches)
        result = trainer.train_step(rows)
        losses.append(result.loss)
        rates.append(result.lr)
        samples.append(whole_batch(rows, trainer.mesh))
    return losses, rates, samples


def whole_batch(rows: torch.Tensor, mesh: Mesh) -> list[list[int]]:
    everyones: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everyones, (mesh.dp_rank, rows.tolist()))
    parts = dict(everyones)
    for dp_rank, part in everyones:
        assert part == parts[dp_rank], "tensor-parallel ranks read different rows"
    return [row for dp_rank in range(mesh.dp_size) for row in parts[dp_rank]]


def with_run(config: Config, run: Path, **train: Any) -> Config:
    tree = config.model_dump()
    tree["train"] |= {"run_dir": run, **train}
    return Config.model_validate(tree)


def everything(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    reader = CheckpointReader(path)
    return {(name, kind): reader.full(name, kind) for name in reader.names() for kind in (WEIGHTS, *MOMENTS)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(1)
    words = ["".join(chance.choices("aeioubdfgklmnprst", k=chance.randint(2, 7))) for _ in range(150)]
    texts = ["\n".join(" ".join(chance.choices(words, k=9)) for _ in range(12)) for _ in range(60)]
    tokenizer, _ = train_tokenizer(texts, VOCABULARY)
    documents = (Document(text, f"document {n}") for n, text in enumerate(texts))
    write_data_folder(folder, documents, tokenizer, Sharding(18), replace=True)
    return small_config(
        model={"vocab_size": tokenizer.vocab_size, "num_key_value_heads": 4},
        data={"path": str(folder)},
        schedule={"kind": "cosine", "warmup_steps": 2},
        train={"max_steps": 20},
    )


@pytest.mark.slow
def test_to_any_layout_and_back(config: Config, tmp_path: Path) -> None:
    """Weights and moments exactly equal, the losses within fp32's rounding, the same rates and samples."""
    assert config.model.vocab_size % 2 == 1
    home = Layout(2, True, 1)
    source = Leg(tmp_path / "source", home)

    def leg(name: str, layout: Layout, start: Leg = source) -> Leg:
        return Leg(tmp_path / name, layout, start.checkpoint)

    wide, deep = leg("TP1xDP4 ZeRO-2", Layout(1, False, 2)), leg("TP4xDP1 ZeRO-3", Layout(4, True, 3))
    three = leg("ZeRO-3", Layout(2, True, 3))
    two = leg("ZeRO-3 to ZeRO-2", Layout(2, True, 2), three)
    one, pair = leg("TP1xDP1 ZeRO-3", Layout(1, False, 3)), leg("TP2xDP1 ZeRO-2", Layout(2, False, 2))
    back = [leg(f"{away.run.name} and back", home, away) for away in (two, wide, deep)]
    far_back = [leg(f"{away.run.name} and back", home, away) for away in (one, pair)]

    starts = [(4, [source, three, two, deep, wide, *back]), (1, [one]), (2, [pair]), (4, far_back)]
    results = {}
    for world_size, legs in starts:
        for result, taken in zip(run_ranks(world_size, follow, config, legs, timeout=180)[0], legs, strict=True):
            results[taken] = result
    saved, expected = everything(source.checkpoint), results[source]
    assert all(saved[name, "exp_avg"].count_nonzero() for name, _ in saved)
    for taken, result in results.items():
        resharded = everything(taken.checkpoint)
        assert resharded.keys() == saved.keys()
        for key, tensor in saved.items():
            assert torch.equal(resharded[key], tensor), (taken, key)
        assert result["samples"] == expected["samples"], taken
        assert result["rates"] == expected["rates"], taken
        if taken.layout == home:
            assert result["losses"] == expected["losses"], taken
        else:
            assert result["losses"] == pytest.approx(expected["losses"], abs=5e-6, rel=0), taken
        # Random numbers go on at the same layout; at another each rank has new ones, the same at each attempt.
        if taken in (source, three, two, back[0]):
            assert result["draws"] == expected["draws"], taken
        else:
            assert result["draws"] == results[wide]["draws"][: len(result["draws"])], taken
    drawn = [tuple(draw) for result in (expected, results[wide]) for draw in result["draws"]]
    assert len(set(drawn)) == len(drawn) == 8


# --- weights only --------------------------------------------------------------------------------------------------


def start_from_dense(config: Config, folder: Path) -> dict[str, Any]:
    """A dense run's weights in coupled runs; returns validation losses and what was refused."""
    dense = with_variant(config, "dense", folder / "dense")
    told: dict[str, Any] = {"refused": []}
    layouts = [Layout(2, True, 1), Layout(2, True, 1), Layout(2, True, 3), Layout(1, False, 2)]
    coupled = [
        with_variant(config, "coupled", folder / f"coupled {n}", init_from=dense.train.run_dir) for n in (1, 2, 3)
    ]
    for own, mesh in meshes(list(zip([dense, *coupled], layouts, strict=True))):
        trainer = Trainer(own, mesh)
        initial = {name: p.detach().clone() for name, p in trainer.engine.model.named_parameters() if p.numel()}
        notes = trainer.resume("auto")
        if own.model.variant == "dense":
            assert notes == []
            take_steps(trainer, BEFORE)
        else:
            assert notes == [f"starting from the weights of {dense.train.run_dir}/checkpoints/step_{BEFORE:08d}"]
            assert trainer.step == 0
            if own.parallel.zero_stage == 1:
                now = dict(trainer.engine.model.named_parameters())
                assert all(torch.equal(now[name], p) for name, p in initial.items() if name.startswith("exchanges."))
        told[str(own.train.run_dir.name)] = trainer.validate()
        trainer.save()
        trainer.saver.wait()
        if own.model.variant != "dense":
            told["first steps " + own.train.run_dir.name] = take_steps(trainer, 2)[0]
        trainer.saver.close()
    # From its own checkpoint a run goes on as any other: the source may be gone.
    lost = with_variant(config, "coupled", folder / "coupled 3", init_from=folder / "gone")
    trainer = Trainer(lost, mesh)
    assert trainer.resume("auto") == [f"resuming from {folder / 'coupled 3' / 'checkpoints' / 'step_00000000'}"]
    told["resumed"] = trainer.validate()
    trainer.saver.close()
    for name, change in REFUSED.items():
        tree = with_variant(config, "coupled", folder / "refused", init_from=folder / "dense").model_dump()
        for section, values in change.items():
            tree[section] |= {key: folder / value if key == "init_from" else value for key, value in values.items()}
        trainer = Trainer(Config.model_validate(tree), mesh)
        with pytest.raises(UserError) as error:
            trainer.resume("auto")
        told["refused"].append((name, str(error.value)))
        trainer.saver.close()
    retokenize(folder / "coupled 3" / "checkpoints" / "step_00000000", mesh)
    for name, source in (("coupled 3", "gone"), ("refused", "coupled 3")):
        trainer = Trainer(with_variant(config, "coupled", folder / name, init_from=folder / source), mesh)
        with pytest.raises(UserError) as error:
            trainer.resume("auto")
        told["refused"].append((f"another tokenizer of {source}", str(error.value)))
        trainer.saver.close()
    return told


def retokenize(path: Path, mesh: Mesh) -> None:
    """The checkpoint as another tokenizer's run would have written it."""
    dist.barrier()
    manifest = files.read_manifest(path)
    manifest["state"]["tokenizer_sha256"] = "0" * 64
    dist.barrier()
    if mesh.is_main:
        (path / files.MANIFEST).write_text(files._encode(manifest))
    dist.barrier()


REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "a narrower MLP": {"model": {"intermediate_size": 12}},
    "other heads": {"model": {"num_attention_heads": 2, "num_key_value_heads": 2}},
    "more layers": {"model": {"num_hidden_layers": 4}},
    "no such run": {"train": {"init_from": "nowhere"}},
    "coupled to dense": {"model": {"variant": "dense"}, "train": {"init_from": "coupled 1"}},
    "other blocks": {"slow": {"pool_size": 9}, "train": {"init_from": "coupled 1"}},
    "open gates held": {"model": {"variant": "frozen"}, "train": {"init_from": "coupled 1"}},
}


def with_variant(config: Config, variant: str, run: Path, **train: Any) -> Config:
    tree = with_run(config, run, **train).model_dump()
    tree["model"] |= {"variant": variant}
    return Config.model_validate(tree)


def test_a_coupled_run_starts_as_the_dense_one_whose_weights_it_takes(config: Config, tmp_path: Path) -> None:
    first, second = run_ranks(2, start_from_dense, config, tmp_path, timeout=120)
    assert first == second
    # The gate at zero keeps the function: bit for bit at one layout, within rounding at another.
    assert first["coupled 1"] == first["coupled 2"] == first["dense"]
    assert first["coupled 3"] == pytest.approx(first["dense"], abs=5e-6, rel=0)
    assert first["resumed"] == first["coupled 3"]
    # New runs of their own: from the first sample on, and no moment of the other run weighs in.
    steps = first["first steps coupled 1"]
    assert steps == pytest.approx(first["first steps coupled 2"], abs=5e-6, rel=0)
    assert steps == pytest.approx(first["first steps coupled 3"], abs=5e-6, rel=0)
    for number in (1, 2, 3):
        reader = CheckpointReader(tmp_path / f"coupled {number}" / "checkpoints" / "step_00000000")
        dense = CheckpointReader(tmp_path / "dense" / "checkpoints" / f"step_{BEFORE:08d}")
        assert reader.state["config"]["train"]["init_from"] == str(tmp_path / "dense")
        assert all(torch.equal(reader.full(name), dense.full(name)) for name in dense.names())
        assert {reader.adam_step(name) for name in reader.names()} <= {None, 0}
        assert not any(reader.full(name, "exp_avg").any() for name in reader.names())

    said = dict(first["refused"])
    for source, words in (
        ("gone", "was trained with another tokenizer than that of"),
        ("coupled 3", "than this run's"),
    ):
        line = said.pop(f"another tokenizer of {source}")
        assert f"{tmp_path}/coupled 3/checkpoints/step_00000000 " in line
        assert words in line
        assert "sha256 000000000000 there, " in line
    path = f"{tmp_path}/dense/checkpoints/step_{BEFORE:08d}"
    assert said == {
        "a narrower MLP": f"train.init_from: layers.0.mlp.down_proj.weight is (16, 24) in {path}, "
        "but (16, 12) in this model",
        "other heads": f"train.init_from: model.num_attention_heads is 2, but {path} was trained with 4",
        "more layers": f"train.init_from: {path} lacks layers.3.input_layernorm.weight",
        "no such run": f"train.init_from: run {tmp_path}/nowhere does not exist",
        "coupled to dense": f"train.init_from: {tmp_path}/coupled 1/checkpoints/step_00000000 "
        "has exchanges.0.gate, which this model lacks",
        "other blocks": f"train.init_from: slow.pool_size is 9, but {tmp_path}/coupled 1/checkpoints/step_00000000 "
        f"was trained with {config.slow.pool_size}",
        "open gates held": f"train.init_from: {tmp_path}/coupled 1/checkpoints/step_00000000 has gates that have "
        "learned, which model.variant=frozen would hold open",
    }


# --- a run that ends while it saves --------------------------------------------------------------------------------


def end_in_a_save(config: Config, run: Path) -> None:
    """A mistake in the data is met at step 3, on one rank, while step 2 is still being written."""
    start_process_group(60)
    mesh, met = build_mesh(1), threading.Event()
    write, take_step = files.write_tensors, Trainer.train_step

    def slow_write(path: Path, tensors: Any) -> Any:
        if mesh.rank == 1:
            assert met.wait(30)
        return write(path, tensors)

    def broken_step(trainer: Trainer, rows: torch.Tensor, measure: bool = False) -> Any:
        if trainer.step == 2 and mesh.rank == 1:
            met.set()
            raise UserError("shard-000000.tar is damaged")
        return take_step(trainer, rows, measure)

    files.write_tensors, Trainer.train_step = slow_write, broken_step  # type: ignore[method-assign]
    tree = with_run(config, run).model_dump()
    tree["checkpoint"] |= {"every": 2}
    if mesh.rank == 1:
        with pytest.raises(UserError, match="is damaged"):
            train(Config.model_validate(tree), mesh)
        assert (run / "checkpoints" / "latest").read_text() == "step_00000002\n"
        os._exit(2)
    train(Config.model_validate(tree), mesh)


def test_a_mistake_ends_a_run_after_what_is_being_written_is_durable(config: Config, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 1: died without a word"):
        run_ranks(2, end_in_a_save, config, tmp_path / "run", timeout=60)
    assert find_checkpoint(tmp_path / "run" / "checkpoints") == (tmp_path / "run" / "checkpoints" / "step_00000002", [])

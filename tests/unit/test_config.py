"""The config tree: what is refused, in which words, and what the defaults become."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.errors import UserError
from fastslow_scale.config_file import load_config
from fastslow_scale.model.model import count_parameters
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.engine import engine_settings
from tests.configs import small_config

pytestmark = pytest.mark.unit

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = CONFIGS / "tiny.yaml"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["slow.pool_size=1"], "slow.pool_size must be at least 2 (got 1) on the command line"),
        (["slow.poolsize=4"], "slow.poolsize is not a known key on the command line (did you mean slow.pool_size?)"),
        (["model.lr=3"], "model.lr is not a known key on the command line (did you mean optimizer.lr?)"),
        (["modle.variant=dense"], "modle is not a known key"),
        (["train.dtype=fp16"], "train.dtype must be one of 'fp32' or 'bf16' (got fp16) on the command line"),
        (["train.max_steps=many"], "train.max_steps must be a valid integer (got many) on the command line"),
        (["slow.exchange_after=[7]"], "slow.exchange_after must name layers between 1 and model.num_hidden_layers = 6"),
        (["slow.exchange_after=[3,2]"], "slow.exchange_after must be increasing, each layer once (got [3, 2])"),
        (
            ["train.dtype=bf16", "parallel.zero_stage=0"],
            "parallel.zero_stage must be 1, 2 or 3 with train.dtype = bf16",
        ),
        (["model.num_attention_heads=3"], "model.num_attention_heads must divide model.hidden_size = 128 (got 3)"),
        (
            ["model.num_key_value_heads=3"],
            "model.num_key_value_heads must divide model.num_attention_heads = 4 (got 3)",
        ),
        (["parallel.tensor_parallel_size=4"], "model.num_key_value_heads must be a multiple of parallel.tensor_par"),
        (["train.micro_batch_size=3"], "train.global_batch_size must be a multiple of train.micro_batch_size = 3"),
        (
            ["parallel.tensor_parallel_size=1"],
            "parallel.sequence_parallel needs parallel.tensor_parallel_size of at lea",
        ),
        (["train.max_steps=null"], "train.max_steps must be given, or train.total_tokens"),
        (["schedule.warmup_tokens=5"], "schedule.warmup_tokens must not be given together with schedule.warmup_steps"),
        (["optimizer.betas=[0.9]"], "optimizer.betas holds too few values on the command line"),
        (["optimizer.betas=[2,3]"], "optimizer.betas must be less than 1 (got 2) on the command line"),
        (["optimizer.lr=inf"], "optimizer.lr must be a finite number (got inf) on the command line"),
        (["train.max_steps=1e300"], "train.max_steps must be less than 2^63 (got 1e300) on the command line"),
        (["slow.initializer_range=-1"], "slow.initializer_range must be greater than 0 (got -1) on the command line"),
        (["train.seed=true"], "train.seed must not be true or false (got True) on the command line"),
        (["train.max_steps=2020-99-99"], "train.max_steps has a value that is not YAML"),
        (["optimizer.lr"], "override 'optimizer.lr' must look like section.key=value"),
        (["optimizer.lr=[1"], "optimizer.lr has a value that is not YAML"),
    ],
)
def test_refused_in_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_config(TINY, overrides)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: {hidden_size: 1", "is not YAML at line"),
        ("- a", "must hold sections such as model: and train:"),
        ("model: 3\ntrain: {}", "model must be"),
        ("train: {seq_length: 8}", "model is missing in"),
        ("model: 2020-99-99", "is not YAML: month must be in"),
        ("[" * 3000, "is not YAML"),
        ("model: \x01", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_broken_files_are_refused_and_never_executed(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=line) as refusal:
        load_config(path)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"config nowhere\.yaml does not exist"):
        load_config("nowhere.yaml")


def test_the_resolved_tree_loads_as_itself(tmp_path: Path) -> None:
    config = load_config(TINY, ["optimizer.lr=1e-3", "slow.initializer_range=fan_in", "model.attention_window=16"])
    assert config.optimizer.lr == 1e-3
    assert config.slow.initializer_range == "fan_in"
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config


@pytest.mark.parametrize("name", ["007", "2026-01-01", "5", "1e5", "yes"])
def test_paths_are_taken_as_they_stand(name: str) -> None:
    assert load_config(TINY, [f"train.run_dir={name}"]).train.run_dir == Path(name)


def test_slow_sizes_follow_the_fast_path() -> None:
    slow = load_config(CONFIGS / "1b.yaml").slow
    assert (slow.hidden_size, slow.intermediate_size, slow.num_attention_heads) == (2048, 5632, 16)
    assert (slow.num_key_value_heads, slow.phi_intermediate_size, slow.initializer_range) == (8, 4096, 0.02)


def test_deepspeed_is_never_told_to_scramble_its_fragments() -> None:
    """round_robin_gradients gives wrong fragments in 0.19.8, and bf16 sums of micro-batches lose small gradients."""
    settings = engine_settings(load_config(TINY), single_process_mesh(), largest=10**6)
    assert "round_robin_gradients" not in settings["zero_optimization"]
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
    assert settings["communication_data_type"] == "fp32"


def test_steps_follow_from_tokens() -> None:
    train = small_config(
        train={"max_steps": None, "total_tokens": 1000, "seq_length": 10, "global_batch_size": 8}
    ).train
    assert train.num_steps == 13
    assert small_config(train={"max_steps": 5, "total_tokens": 10**9}).train.num_steps == 5


@pytest.mark.parametrize(("ranks", "data_parallel"), [(2, 1), (4, 2)])
def test_data_parallel_size_follows_from_the_ranks(ranks: int, data_parallel: int) -> None:
    config = load_config(TINY)
    assert config.data_parallel_size(ranks) == data_parallel
    assert config.gradient_accumulation_steps(data_parallel) == 2 // data_parallel


def test_worlds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match=r"must divide the number of ranks \(got 2 for 3 ranks\)"):
        load_config(TINY).data_parallel_size(3)
    with pytest.raises(UserError, match=r"= 8 x 4 \(got 16 for 8 ranks, tensor parallel 2\)"):
        load_config(TINY).data_parallel_size(8)


@pytest.mark.parametrize(
    ("name", "size", "tolerance"),
    [("tiny", 2.5e6, 0.25), ("paper_500k", 1.5e6, 0.1), ("125m", 125e6, 0.05), ("1b", 1e9, 0.05), ("7b", 7e9, 0.05)],
)
def test_shipped_configs_have_the_size_of_their_name(name: str, size: float, tolerance: float) -> None:
    count = count_parameters(load_config(CONFIGS / f"{name}.yaml"), single_process_mesh())
    assert count == pytest.approx(size, rel=tolerance)


def test_scale_10m_stays_within_two_million_parameters() -> None:
    assert count_parameters(load_config(CONFIGS / "scale_10m.yaml"), single_process_mesh()) <= 2e6

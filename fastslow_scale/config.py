"""One validated tree for a whole run: the sections, their keys, and the rules that span several of them.

`config_file.load_config` reads it from a file and words its mistakes.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from data_pipeline.errors import UserError
from data_pipeline.folder import is_url

Beta = Annotated[float, Field(ge=0, lt=1)]
LARGEST_INTEGER = 2**63 - 1
"""What torch's and numpy's integers hold."""

LEAK = "a block's mean given to the block's own tokens shows them the tokens that they are to predict"
Variant = Literal["dense", "coupled", "frozen", "frozen_slow", "shuffled"]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are checked on assignment too, no silent casts."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _nothing_in_disguise(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts true as 1; YAML 1.1 reads a folder named 2026-01-01 as a date, and 1e9 as text."""
        kind = cls.model_fields[info.field_name or ""].annotation
        kinds = (kind, *typing.get_args(kind))
        if isinstance(value, bool) and bool not in kinds:
            raise PydanticCustomError("disguised", "must not be true or false")
        if isinstance(value, str) and int in kinds:
            with contextlib.suppress(ValueError):
                value = float(value)
        if isinstance(value, int | float) and int in kinds and LARGEST_INTEGER < value < math.inf:
            raise PydanticCustomError("too_large", "must be less than 2^63")
        return str(value) if isinstance(value, datetime.date) else value


class ModelConfig(Section):
    """The fast path (Llama's words) and the variant."""

    variant: Variant = Field(
        default="coupled",
        description="shuffled: each sequence hears of the slow state of another one, a control without information",
    )
    vocab_size: int = Field(ge=8, lt=2**31)
    hidden_size: int = Field(ge=2)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1, description="default: num_attention_heads")
    rope_theta: float = Field(default=10000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    tie_word_embeddings: bool = False
    attention_window: int | None = Field(
        default=None, ge=1, description="a token sees itself and the window - 1 tokens before it; null: all"
    )
    initializer_range: float = Field(default=0.02, gt=0)
    vocab_multiple: int = Field(
        default=128,
        ge=1,
        description="the embedding has vocab_size rounded up to this multiple; padding is never predicted",
    )

    @field_validator("variant", mode="before")
    @classmethod
    def _no_leak(cls, variant: Any) -> Any:
        if variant == "unshifted":
            raise ValueError(f"model.variant|unshifted|is not trained: {LEAK}")
        return variant

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


class SlowConfig(Section):
    """The slow path. Sizes left out follow the fast path's."""

    pool_size: int = Field(default=8, ge=2)
    exchange_after: list[int] = Field(
        default=[], description="fast layers, counted from 1; empty: after the middle one"
    )
    num_layers: int = Field(default=1, ge=0, description="slow layers of each exchange")
    hidden_size: int | None = Field(default=None, ge=2)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    phi_intermediate_size: int | None = Field(default=None, ge=1, description="default: 2 x slow.hidden_size")
    initializer_range: Annotated[float, Field(gt=0)] | Literal["fan_in"] | None = Field(
        default=None, description="a number, fan_in (1/sqrt(fan_in)), or null: the model's own"
    )
    lr_multiplier: float = Field(default=1.0, gt=0)
    gate_lr_multiplier: float = Field(default=1.0, gt=0)
    eps: float = Field(default=1e-15, gt=0, description="AdamW's eps for the slow weights and the gates")

    @property
    def head_dim(self) -> int:
        assert self.hidden_size and self.num_attention_heads, "filled by Config"
        return self.hidden_size // self.num_attention_heads


class ParallelConfig(Section):
    """The layout. The data-parallel size follows from the number of ranks."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    zero_stage: Literal[0, 1, 2, 3] = 1


class OptimizerConfig(Section):
    """AdamW. Matrices decay; norms, gates and nothing else do not."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    grad_clip: float = Field(default=1.0, ge=0, description="largest global gradient norm; 0: no clipping")
    clip_slow_apart: bool = Field(
        default=False, description="the slow path and the gates have a norm of their own, clipped to the same size"
    )


class ScheduleConfig(Section):
    """The learning rate as a function of the tokens seen."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_tokens: int | None = Field(default=None, ge=0)
    decay_fraction: float = Field(
        default=0.2, ge=0, le=1, description="wsd: the last part of the run, falling linearly"
    )
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)


def _normal_location(location: Any) -> Any:
    """A path in its shortest form, so that data/x and data/x/ are one; URLs as they stand."""
    return str(Path(location)) if isinstance(location, str | Path) and not is_url(location) else location


class SourceConfig(Section):
    """One of several data folders; weights are relative to their sum."""

    path: str
    weight: float = Field(default=1.0, gt=0)
    name: str | None = Field(default=None, pattern=r"^[\w.-]+$", description="default: the last part of the path")

    _normal = field_validator("path", mode="before")(_normal_location)


class DataConfig(Section):
    path: str | None = Field(default=None, description="a folder written by `fastslow data shard`, or its URL")
    sources: list[SourceConfig] = Field(default=[], description="instead of path: folders to mix by their weights")
    order_seed: int | None = Field(
        default=None, ge=0, lt=2**32, description="another order of the same samples; null: train.seed"
    )
    num_workers: int = Field(
        default=0, ge=0, description="reader processes of each rank; 0: read in the training process"
    )
    reset_at_document: bool = Field(
        default=False, description="attention, blocks and feedback never reach from one document into another"
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop", description="a damaged member ends the run, or is replaced by another and counted"
    )
    cache_dir: Path = Field(default=Path("data/cache"), description="where the shards of URLs are kept")
    cache_gb: float = Field(default=100.0, gt=0, description="the most that all shards in cache_dir may take")

    _normal = field_validator("path", mode="before")(_normal_location)


class TrainConfig(Section):
    run_dir: Path = Path("runs/default")
    seed: int = Field(default=0, ge=0, lt=2**32)
    dtype: Literal["fp32", "bf16"] = "fp32"
    seq_length: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1, description="sequences of one forward pass of one data-parallel rank")
    global_batch_size: int = Field(ge=1, description="sequences of one optimizer step over all ranks")
    init_from: Path | None = Field(
        default=None, description="a run folder or a checkpoint whose weights a new run starts from"
    )
    max_steps: int | None = Field(default=None, ge=1)
    total_tokens: int | None = Field(default=None, ge=1)
    deterministic: bool = Field(default=False, description="deterministic kernels for the whole model (GPUs)")
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="activations recomputed in the backward: attention and MLP inner parts, or whole layers",
    )
    compile: bool = Field(
        default=False, description="compile what lies between the matrix products of a layer; the first step then waits"
    )
    sanity_every: int = Field(
        default=100, ge=0, description="steps between checks that replicas agree bitwise; 0: only at the start"
    )
    max_bad_steps: int = Field(
        default=10, ge=1, description="steps in a row that may go unapplied before the run stops"
    )
    spike_sigma: float = Field(
        default=6.0, ge=0, description="a loss this many standard deviations above the last ones is a spike; 0: never"
    )
    spike_window: int = Field(default=100, ge=10, description="losses that a spike is measured against")
    skip_spikes: bool = Field(default=False, description="keep a spike's gradient from the weights")
    timeout_seconds: int = Field(default=600, ge=1, le=10**7, description="a rank waits this long for the others")

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run; `total_tokens` is rounded up to whole steps."""
        limits = [self.max_steps] if self.max_steps else []
        if self.total_tokens:
            limits.append(-(-self.total_tokens // self.tokens_per_step))
        return min(limits)


class CheckpointConfig(Section):
    every: int = Field(default=1000, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(default=3, ge=1, description="how many of the newest checkpoints stay")
    keep_every: int = Field(default=0, ge=0, description="checkpoints of steps divisible by this stay too; 0: none")
    asynchronous: bool = Field(
        default=True, description="write while training goes on, from a copy of the state in host memory"
    )


class MonitorConfig(Section):
    log_every: int = Field(default=10, ge=1)
    tensorboard: bool = True
    csv: bool = Field(default=False, description="the numbers of metrics.jsonl also as a table, RUN/metrics.csv")
    wandb_project: str | None = Field(
        default=None, min_length=1, description="send the curves to this project of Weights & Biases; null: nothing"
    )
    ledger: bool = Field(default=False, description="show what the second step after a start moves between ranks")
    profile_steps: list[int] = Field(
        default=[], description="first and last step of a torch profiler trace, written to RUN/profile; empty: none"
    )


class ValidationConfig(Section):
    every: int = Field(default=500, ge=0, description="steps between validations; 0: only before and after")
    max_sequences: int = Field(default=256, ge=1)


class StudyConfig(Section):
    """How runs are compared, by `fastslow ablate`; training does not read it."""

    margin_nats: float = Field(
        default=0.01, gt=0, description="differences of the validation loss inside this margin count as none"
    )


class Config(Section):
    model: ModelConfig
    slow: SlowConfig = SlowConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    validation: ValidationConfig = ValidationConfig()
    study: StudyConfig = StudyConfig()

    @model_validator(mode="after")
    def _fill_and_check(self) -> Config:
        _fill_defaults(self)
        for key, value, rule in _broken_rules(self):
            raise ValueError(f"{key}|{value}|{rule}")
        return self

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that see different data. Raises `UserError` where `world_size` ranks cannot run this layout."""
        tp, train = self.parallel.tensor_parallel_size, self.train
        if world_size < 1:
            raise UserError(f"the number of ranks must be at least 1 (got {world_size})")
        if world_size % tp:
            raise UserError(
                f"parallel.tensor_parallel_size must divide the number of ranks (got {tp} for {world_size} ranks)"
            )
        dp = world_size // tp
        if train.global_batch_size % (train.micro_batch_size * dp):
            raise UserError(
                f"train.global_batch_size must be a multiple of train.micro_batch_size x data-parallel ranks = "
                f"{train.micro_batch_size} x {dp} (got {train.global_batch_size} for {world_size} ranks, "
                f"tensor parallel {tp})"
            )
        return dp

    @property
    def order_seed(self) -> int:
        """What decides the order of the samples."""
        return self.train.seed if self.data.order_seed is None else self.data.order_seed

    def gradient_accumulation_steps(self, data_parallel_size: int) -> int:
        return self.train.global_batch_size // (self.train.micro_batch_size * data_parallel_size)

    def to_yaml(self) -> str:
        """The resolved tree; loading it gives an equal `Config`."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _fill_defaults(config: Config) -> None:
    """Write the derived defaults into the tree, so that the resolved config says them."""
    model, slow = config.model, config.slow
    if model.num_key_value_heads is None:
        model.num_key_value_heads = model.num_attention_heads
    if slow.num_key_value_heads is None:
        same_heads = slow.num_attention_heads in (None, model.num_attention_heads)
        slow.num_key_value_heads = model.num_key_value_heads if same_heads else slow.num_attention_heads
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        if getattr(slow, name) is None:
            setattr(slow, name, getattr(model, name))
    if slow.phi_intermediate_size is None and slow.hidden_size is not None:
        slow.phi_intermediate_size = 2 * slow.hidden_size
    if slow.initializer_range is None:
        slow.initializer_range = model.initializer_range
    if not slow.exchange_after:
        slow.exchange_after = [max(1, model.num_hidden_layers // 2)]
    if config.schedule.warmup_steps is None and config.schedule.warmup_tokens is None:
        config.schedule.warmup_steps = 0


def _broken_rules(config: Config) -> Iterable[tuple[str, Any, str]]:
    """Yield (key, value, what it must be) for each rule that spans several keys and does not hold."""
    model, slow, parallel, train = config.model, config.slow, config.parallel, config.train
    tp = parallel.tensor_parallel_size
    for name, section in (("model", model), ("slow", slow)):
        hidden, heads, kv = section.hidden_size, section.num_attention_heads, section.num_key_value_heads
        assert hidden and heads and kv, "filled by _fill_defaults"
        if hidden % heads:
            yield f"{name}.num_attention_heads", heads, f"must divide {name}.hidden_size = {hidden}"
        elif (hidden // heads) % 2:
            yield f"{name}.num_attention_heads", heads, f"must leave an even head size (RoPE), not {hidden // heads}"
        if heads % kv:
            yield f"{name}.num_key_value_heads", kv, f"must divide {name}.num_attention_heads = {heads}"
    if model.num_attention_heads % tp:
        yield (
            "model.num_attention_heads",
            model.num_attention_heads,
            f"must be a multiple of parallel.tensor_parallel_size = {tp}",
        )
    if model.key_value_heads % tp:
        yield (
            "model.num_key_value_heads",
            model.key_value_heads,
            f"must be a multiple of parallel.tensor_parallel_size = {tp}",
        )
    if model.intermediate_size % tp:
        yield (
            "model.intermediate_size",
            model.intermediate_size,
            f"must be a multiple of parallel.tensor_parallel_size = {tp}",
        )
    if model.padded_vocab_size % tp:
        yield (
            "model.vocab_multiple",
            model.vocab_multiple,
            f"must be a multiple of parallel.tensor_parallel_size = {tp}",
        )
    after, layers = slow.exchange_after, model.num_hidden_layers
    if any(not 1 <= layer <= layers for layer in after):
        yield "slow.exchange_after", after, f"must name layers between 1 and model.num_hidden_layers = {layers}"
    if sorted(set(after)) != after:
        yield "slow.exchange_after", after, "must be increasing, each layer once"
    if parallel.sequence_parallel and tp == 1:
        yield "parallel.sequence_parallel", True, "needs parallel.tensor_parallel_size of at least 2"
    if train.dtype == "bf16" and parallel.zero_stage == 0:
        yield (
            "parallel.zero_stage",
            0,
            "must be 1, 2 or 3 with train.dtype = bf16 (DeepSpeed's bf16 ZeRO-0 computes a wrong norm)",
        )
    if config.optimizer.clip_slow_apart and parallel.zero_stage:
        yield (
            "optimizer.clip_slow_apart",
            True,
            f"needs parallel.zero_stage = 0, not {parallel.zero_stage} (DeepSpeed's ZeRO clips by one norm of all)",
        )
    profiled = config.monitor.profile_steps
    if profiled and (len(profiled) != 2 or not 1 <= profiled[0] <= profiled[1]):
        yield "monitor.profile_steps", profiled, "must be a first and a last step, such as [10, 12]"
    if model.variant == "shuffled" and train.micro_batch_size < 2:
        yield (
            "train.micro_batch_size",
            train.micro_batch_size,
            "must be at least 2 with model.variant = shuffled (there is no other sequence to take a slow state from)",
        )
    if config.data.path is not None and config.data.sources:
        yield "data.sources", config.data.path, "must not be given together with data.path"
    if train.max_steps is None and train.total_tokens is None:
        yield "train.max_steps", None, "must be given, or train.total_tokens"
    elif config.schedule.warmup_steps is not None and config.schedule.warmup_tokens is not None:
        yield (
            "schedule.warmup_tokens",
            config.schedule.warmup_tokens,
            "must not be given together with schedule.warmup_steps",
        )
    if train.global_batch_size % train.micro_batch_size:
        yield (
            "train.global_batch_size",
            train.global_batch_size,
            f"must be a multiple of train.micro_batch_size = {train.micro_batch_size}",
        )

"""What only shows on machines with GPUs, as far as it can be tried without one: choices, contexts and mistakes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist

from fastslow_scale.errors import RunError
from fastslow_scale.model import slow_path
from fastslow_scale.model.compiled import compile_inner_parts
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel import mesh
from fastslow_scale.parallel.mesh import local_device, single_process_mesh, start_process_group
from fastslow_scale.plan.engine_state import engine_state
from fastslow_scale.plan.parameters import rank_weights
from fastslow_scale.train.engine import BUCKET_ELEMENTS, bucket_elements
from tests.configs import small_config

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("recompute", "calls"), [("none", 2), ("selective", 4), ("full", 4)])
@pytest.mark.parametrize("documents", [True, False])
def test_recomputed_slow_attention_takes_the_same_kernel(
    recompute: str, calls: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward computes it again when the forward has left every context: another kernel keeps other tensors."""
    config = small_config(slow={"num_layers": 2, "exchange_after": [2]}, train={"recompute": recompute})
    inside, seen = [False], []

    @contextlib.contextmanager
    def chosen(device: torch.device) -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        seen.append(inside[0])
        return plain(q, k, v, window)

    plain = slow_path.causal_attention
    monkeypatch.setattr(slow_path, "deterministic_attention", chosen)
    monkeypatch.setattr(slow_path, "causal_attention", attend)
    exchange = build_model(config, single_process_mesh()).exchanges[0]
    size = config.model.hidden_size
    rope = (torch.ones(5, 1, 1, 1, config.slow.head_dim), torch.zeros(5, 1, 1, 1, config.slow.head_dim))
    blocks = torch.randn(5, 2, size, requires_grad=True)
    attends = [attend] * 2 if documents else None
    exchange.advance(blocks, None, rope, attends).sum().backward()
    assert seen == [True] * calls


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "SLURM_GPUS_ON_NODE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("gpus", "environment", "device"),
    [
        (0, {"LOCAL_RANK": "3"}, "cpu"),
        (1, {}, "cuda:0"),
        (4, {"LOCAL_RANK": "3"}, "cuda:3"),
        (4, {"LOCAL_RANK": "3", "SLURM_LOCALID": "3"}, "cuda:3"),
        (1, {"LOCAL_RANK": "3", "SLURM_LOCALID": "3"}, "cuda:0"),
    ],
)
def test_a_rank_takes_its_gpu(
    gpus: int, environment: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(gpus, monkeypatch, **environment)
    assert local_device() == torch.device(device)


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_LOCALID": "0"}, {"SLURM_LOCALID": "1", "TORCHELASTIC_RUN_ID": "7"}]
)
def test_more_ranks_than_gpus_are_a_mistake(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the launcher's ranks all see all GPUs, inside a task of SLURM too."""
    with_gpus(1, monkeypatch, LOCAL_RANK="1", **environment)
    with pytest.raises(RunError, match=r"more ranks than GPUs: 1; use --nproc 1, or set CUDA_VISIBLE_DEVICES"):
        local_device()


def test_gpus_that_torch_cannot_use_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that asked for eight GPUs must not train on the cores beside them."""
    with_gpus(0, monkeypatch, SLURM_GPUS_ON_NODE="8")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(mesh, "DRIVER", tmp_path)
    with pytest.raises(RunError, match=r"SLURM gave 8 GPUs on \S+, but torch \S+ cannot use them"):
        start_process_group()


def test_deepspeed_is_told_the_gpu_of_a_task_that_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls torch.cuda.set_device(LOCAL_RANK)."""
    with_gpus(1, monkeypatch, LOCAL_RANK="3", SLURM_LOCALID="3")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    start_process_group()
    assert taken == [torch.device("cuda:0")]
    assert os.environ["LOCAL_RANK"] == "0"
    assert local_device() == torch.device("cuda:0")


def test_a_gradient_whose_reduction_is_overlapped_fits_in_a_bucket() -> None:
    config = small_config(parallel={"zero_stage": 2})
    assert bucket_elements(config, 65_000_000, on_gpu=True) == 65_000_000
    assert bucket_elements(config, 10, on_gpu=True) == BUCKET_ELEMENTS
    assert bucket_elements(config, 65_000_000, on_gpu=False) == BUCKET_ELEMENTS
    assert bucket_elements(small_config(parallel={"zero_stage": 1}), 65_000_000, on_gpu=True) == BUCKET_ELEMENTS
    one = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": 8})})
    assert engine_state(one, 4, 100, on_gpu=True).buckets == 2 * 4 * max(rank_weights(config)), "as the plan knows"


def test_compiled_kernels_are_not_chosen_by_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "deterministic", False)
    compile_inner_parts(torch.nn.Module())
    assert not inductor.deterministic
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compile_inner_parts(torch.nn.Module())
    assert inductor.deterministic

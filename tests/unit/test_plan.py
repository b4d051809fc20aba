"""Plans: parameters against the model, memory against autograd's saved tensors, roofline and search by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fastslow_scale.config import Config
from fastslow_scale.model.documents import Documents
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.hardware import GPUS
from fastslow_scale.parallel.ledger import Traffic
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.plan.activations import activations, kept_by_math_attention
from fastslow_scale.plan.communication import groups_of, planned_traffic, seconds
from fastslow_scale.plan.engine_state import engine_state, flat_copies
from fastslow_scale.plan.machine import HOPPER, LATENCY_SECONDS, Machine
from fastslow_scale.plan.parameters import optimizer_groups, parameter_parts, rank_weights
from fastslow_scale.plan.roofline import step_time
from fastslow_scale.plan.search import judge, ranked, what_would_help, why_it_lost
from fastslow_scale.train.optimizer import parameter_groups
from tests.commands import fastslow, refused
from tests.configs import small_config

pytestmark = pytest.mark.unit

BUCKET = 50_000_000


def machine(**changes: Any) -> Machine:
    base = {
        "name": "h100",
        "nodes": 1,
        "ranks_per_node": 8,
        "flops": 1e15,
        "fp32_flops": 1e14,
        "memory_bytes": 80e9,
        "memory_bytes_per_second": 3e12,
        "link_bytes_per_second": 4e11,
        "network_bytes_per_second": 4e11,
        "power_watts": 700.0,
        "efficiency": HOPPER,
        "hides_communication": True,
    }
    return Machine(**(base | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"variant": "dense"}},
        {"model": {"variant": "frozen"}},
        {"model": {"variant": "frozen_slow"}},
        {"model": {"tie_word_embeddings": True}, "slow": {"exchange_after": [1, 2, 3], "hidden_size": 24}},
        {"slow": {"num_layers": 0, "phi_intermediate_size": 5}},
        {"slow": {"num_layers": 2, "intermediate_size": 20, "num_attention_heads": 4}},
    ],
)
def test_parameters_are_those_of_the_model(changes: dict[str, Any]) -> None:
    config = small_config(**changes)
    with torch.device("meta"):
        model = build_model(config, single_process_mesh())
    params = list(model.parameters())
    assert sorted(rank_weights(config)) == sorted(p.numel() for p in params)
    assert sum(part.elements for part in parameter_parts(config)) == sum(p.numel() for p in params)
    groups = [sum(p.numel() for p in group["params"]) for group in parameter_groups(model, config)]
    assert optimizer_groups(config) == groups


def saved_bytes(config: Config) -> int:
    """Bytes of all storages that autograd holds for the backward of the layers, weights and the loss's own left out."""
    model = build_model(config, single_process_mesh())
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(0, config.model.vocab_size, (config.train.micro_batch_size, config.train.seq_length))
    documents = Documents.of_tokens(tokens, eos_id=1) if config.data.reset_at_document else None
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.hidden(tokens, documents)
    assert hidden.requires_grad
    kept[hidden.untyped_storage().data_ptr()] = hidden.untyped_storage()  # the head's input
    return sum(storage.nbytes() for storage in kept.values())


WIDE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 8,
    "vocab_multiple": 128,
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", ["dense", "coupled"])
def test_kept_activations_are_what_autograd_saves(recompute: str, dtype: str, variant: str) -> None:
    """Within 2%: the formula leaves out what is one number a token, and the rotation's tables."""
    config = small_config(
        model=WIDE | {"variant": variant, "num_key_value_heads": 4},
        slow={"num_attention_heads": 8, "num_key_value_heads": 4, "num_layers": 2},
        parallel={"zero_stage": 1},
        train={"seq_length": 128, "dtype": dtype, "recompute": recompute},
    )
    assert activations(config, on_gpu=False).kept == pytest.approx(saved_bytes(config), rel=0.02)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("pairs", [8, 4])
@pytest.mark.parametrize(
    ("window", "documents"), [(32, False), (100, False), (None, True), (100, True), (160, False), (10**4, False)]
)
def test_masked_attention_keeps_copies_and_masks(window: int | None, documents: bool, pairs: int, batch: int) -> None:
    """Within 4%: what documents add to the exchanges, a number a token, is left out."""
    config = small_config(
        model=WIDE | {"num_key_value_heads": pairs, "attention_window": window},
        slow={"num_attention_heads": 8, "num_key_value_heads": pairs, "num_layers": 2},
        train={"seq_length": 256, "micro_batch_size": batch, "global_batch_size": batch},
        data={"reset_at_document": documents},
    )
    assert activations(config, on_gpu=False).kept == pytest.approx(saved_bytes(config), rel=0.04)


def test_plain_attention_keeps_its_weights() -> None:
    """The slow path's kernel on GPUs, here on the CPU: bf16 in, fp32 inside."""
    slow = small_config(slow={"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}).slow
    blocks, batch, size = 24, 3, 32
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    q, k, v = (torch.randn(batch, n, blocks, size, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
    with sdpa_kernel(SDPBackend.MATH), saved_tensors_hooks(keep, lambda tensor: tensor):
        scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert kept_by_math_attention(slow, blocks, batch) == sum(storage.nbytes() for storage in kept.values())


def test_an_engine_of_bf16_holds_zero_s_bytes() -> None:
    """arXiv 1910.02054, figure 1: 2 + 2 + 12 bytes a parameter; here the gradients' sum is fp32."""
    config = small_config(train={"dtype": "bf16"}, parallel={"zero_stage": 1})
    trained = sum(optimizer_groups(config))
    found = engine_state(config, 4, BUCKET, on_gpu=True)
    assert (found.weights, found.gradients) == (2 * trained, 4 * trained)
    assert found.optimizer == 12 * -(-trained // 4)
    third = engine_state(small_config(train={"dtype": "bf16"}, parallel={"zero_stage": 3}), 4, BUCKET, on_gpu=True)
    assert third.gradients == 4 * -(-trained // 4)


def test_flat_copies_stop_after_500_million_elements() -> None:
    assert flat_copies([600_000_000, 10, 20]) == [0, 30 * 4]
    assert flat_copies([400_000_000, 200_000_000]) == [600_000_000 * 4]


def test_groups_follow_the_rank_order() -> None:
    """Two nodes of eight ranks, tensor parallel 2: pairs of neighbours; every second rank of both nodes."""
    groups = groups_of(machine(nodes=2), 2)
    assert (groups["tp"].size, groups["tp"].crosses) == (2, False)
    assert (groups["dp"].size, groups["dp"].inside, groups["dp"].side_by_side) == (8, 4, 2)
    assert groups["dp"].crosses
    assert not groups_of(machine(), 2)["dp"].crosses
    assert groups_of(machine(nodes=2, ranks_per_node=2), 4)["tp"].crosses
    assert groups_of(machine(nodes=2, ranks_per_node=3), 2)["tp"].crosses  # ranks 2 and 3


def test_a_ring_takes_as_long_as_its_slowest_link() -> None:
    two_nodes = machine(nodes=2)
    groups, bus = groups_of(two_nodes, 2), HOPPER.bus
    inside = seconds("all_gather", Traffic(1, 8e9), groups["tp"], two_nodes)
    assert inside == pytest.approx(0.5 * 8e9 / (4e11 * bus) + LATENCY_SECONDS)
    across = seconds("all_reduce", Traffic(3, 8e9), groups["dp"], two_nodes)
    assert across == pytest.approx(2 * 7 / 8 * 8e9 * 2 / (4e11 * bus) + 3 * LATENCY_SECONDS)


def test_a_step_of_products_alone_takes_the_peak_s_time() -> None:
    """With everything else infinitely fast: 6 FLOPs a parameter and token (PaLM, appendix B), over the peak."""
    config = small_config(model=WIDE | {"variant": "dense"}, train={"seq_length": 64})
    fast = machine(
        ranks_per_node=1,
        memory_bytes_per_second=1e30,
        efficiency=HOPPER.__class__(matmul=0.5, attention=1e30, memory=1, bus=1),
    )
    model = config.model
    layer = 128 * (8 + 2 * 2) * 16 + 128 * 128 + 3 * 128 * 352
    flops = 6 * (model.num_hidden_layers * layer + 512 * 128) * config.train.tokens_per_step
    assert step_time(config, fast, BUCKET).seconds == pytest.approx(flops / 0.5e15)


@pytest.mark.parametrize(("window", "keys"), [(None, 4096), (512, 512 + 256), (8192, 4096)])
def test_attention_takes_the_time_of_the_keys_that_its_queries_meet(window: int | None, keys: int) -> None:
    """Without a window half of all; else a window and the chunk of half a window that the query is in."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}
    config = small_config(
        model={"variant": "dense", "attention_window": window, **shape},
        train={"seq_length": 8192, "micro_batch_size": 2, "global_batch_size": 2},
    )
    slow = machine(ranks_per_node=1, flops=1e12, efficiency=HOPPER.__class__(matmul=1, attention=0.5, memory=1, bus=1))
    forward = 3 * 2 * (2 * 2 * 8192 * keys * 64)  # layers, sequences; two products of 2 T k D each
    assert step_time(config, slow, BUCKET).parts["attention"] == pytest.approx(3.5 * forward / 0.5e12)


def test_without_zero_every_rank_updates_all_weights() -> None:
    """AdamW reads weight, gradient and both moments and writes three of them, in fp32; the weight's copy: 34 bytes."""
    config = small_config(train={"global_batch_size": 8, "micro_batch_size": 1}, parallel={"zero_stage": 0})
    sharded = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero_stage": 1})})
    whole, part = (step_time(c, machine(), BUCKET).parts["gradients and optimizer"] for c in (config, sharded))
    more = 34 * sum(optimizer_groups(config)) * (1 - 1 / 8)
    assert whole - part == pytest.approx(more / (3e12 * HOPPER.memory))


def test_zero_2_gathers_the_new_weights_after_the_step() -> None:
    """Its sums run beside the backward, this does not."""
    config = small_config(train={"global_batch_size": 8, "micro_batch_size": 1}, parallel={"zero_stage": 2})
    links = machine(link_bytes_per_second=1e6, flops=1e3)  # the backward is far longer than the sums
    shown = {key: entry for key, entry in planned_traffic(config, 8, BUCKET).items() if key[0] != "tp"}
    hidden = [key for key in shown if key[0] == "dp" and key[1] != "all_gather"]
    assert hidden
    groups = groups_of(links, 1)
    wanted = sum(
        seconds(kind, entry, groups[name], links) for (name, kind), entry in shown.items() if (name, kind) not in hidden
    )
    assert step_time(config, links, BUCKET).parts["data-parallel communication"] == pytest.approx(wanted)


@pytest.mark.parametrize(("recompute", "times"), [("none", 3), ("selective", 4), ("full", 4)])
def test_slow_attention_takes_the_time_of_fp32(recompute: str, times: int) -> None:
    """All of S x S, scores and sums of values: 4 S^2 D a layer and sequence."""
    config = small_config(
        model={"hidden_size": 64, "num_attention_heads": 4},
        slow={"pool_size": 4, "num_layers": 2, "exchange_after": [1, 2]},
        train={"seq_length": 128, "recompute": recompute, "micro_batch_size": 2, "global_batch_size": 2},
    )
    slow, none = (machine(ranks_per_node=1, fp32_flops=speed) for speed in (1e9, 1e30))
    more = step_time(config, slow, BUCKET).parts["slow path"] - step_time(config, none, BUCKET).parts["slow path"]
    forward = 2 * 2 * 2 * 4 * 32**2 * 64  # sequences, exchanges, layers
    assert more == pytest.approx(times * forward / (1e9 * HOPPER.matmul))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_all_reduces_of_the_slow_path_hide_behind_nothing(sequence_parallel: bool) -> None:
    """Under sequence parallelism no product runs beside them; without, half of the layers' do."""
    config = small_config(
        model={"num_key_value_heads": 4},
        parallel={"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel, "zero_stage": 1},
        train={"global_batch_size": 8, "micro_batch_size": 2},
    )
    traffic, groups = planned_traffic(config, 4, BUCKET), groups_of(machine(), 2)
    shown = {"all_gather": 2 / 3, "reduce_scatter": 1 / 2} if sequence_parallel else {"all_reduce": 1 / 2}
    wanted = sum(
        shown.get(kind, 1.0) * seconds(kind, entry, groups[name], machine())
        for (name, kind), entry in traffic.items()
        if name == "tp"
    )
    assert step_time(config, machine(), BUCKET).parts["tensor-parallel communication"] == pytest.approx(wanted)


def big(**train: Any) -> Config:
    tree = small_config(model=WIDE | {"num_key_value_heads": 8}, train={"dtype": "bf16"}, parallel={"zero_stage": 1})
    return Config.model_validate(tree.model_dump() | {"train": tree.train.model_dump() | train})


def test_the_search_ranks_what_fits_by_its_step() -> None:
    config = big(seq_length=2048, global_batch_size=64)
    found = ranked(config, machine(), BUCKET)
    assert found[0].fits
    times = [layout.time.seconds for layout in found if layout.fits]
    assert times == sorted(times)
    assert {layout.config.parallel.zero_stage for layout in found} == {1, 2, 3}  # bf16 with ZeRO-0 is refused
    loser = found[-1]
    assert f"{loser.time.seconds / found[0].time.seconds - 1:.1%} slower" in why_it_lost(loser, found[0])


def test_the_search_tries_every_divisor_and_the_config_itself() -> None:
    """480 sequences over 32 data-parallel ranks: 15 each, in micro-batches of 1, 3, 5 and 15."""
    config = big(seq_length=64, global_batch_size=480, micro_batch_size=5)
    eight_nodes = machine(nodes=8)
    assert any(layout.config.train.micro_batch_size == 15 for layout in ranked(config, eight_nodes, BUCKET))
    tree = config.model_dump()
    tree["parallel"] |= {"tensor_parallel_size": 8, "sequence_parallel": False}  # the search itself takes it with
    own = Config.model_validate(tree)
    found = ranked(own, machine(ranks_per_node=4, nodes=2), BUCKET)  # and inside a node
    assert any(layout.config == own for layout in found)


def test_a_layout_that_does_not_fit_never_wins() -> None:
    config = big(seq_length=2048, global_batch_size=64)
    fastest = ranked(config, machine(), BUCKET)[0]
    found = ranked(config, machine(memory_bytes=fastest.memory.peak - 1), BUCKET)
    assert found[0].fits
    assert found[0].time.seconds > fastest.time.seconds
    fits = [layout.fits for layout in found]
    assert fits == sorted(fits, reverse=True)
    last = judge(fastest.config, machine(memory_bytes=1e5), BUCKET)
    assert f"does not fit: {(last.memory.peak - 1e5) / 1e9:.1f} GB too much" in why_it_lost(last, fastest)


def test_what_would_help_names_changes_that_do() -> None:
    config = big(seq_length=2048, global_batch_size=64)
    own = judge(config, machine(), BUCKET)
    full = judge(big(seq_length=2048, global_batch_size=64, recompute="full"), machine(), BUCKET)
    between = machine(memory_bytes=(own.memory.peak + full.memory.peak) / 2)
    assert not judge(config, between, BUCKET).fits
    assert "fits with train.recompute=full" in what_would_help(config, between, BUCKET)
    smallest = ranked(config, machine(memory_bytes=1e5), BUCKET)
    tight = machine(memory_bytes=min(layout.memory.peak for layout in smallest) - 1)
    (more_nodes, memory) = what_would_help(config, tight, BUCKET)
    assert more_nodes.startswith("fits on 2 nodes, as TP ")
    assert memory.startswith("fits in ranks with ")
    lines = what_would_help(config, machine(memory_bytes=1e5), BUCKET)
    assert lines[0].startswith("fits on no number of nodes")
    assert lines[1].startswith("fits in ranks with ")


def test_messages_of_a_step_are_the_ledger_s() -> None:
    """The formula that tests/parallel/test_sanity.py holds against what torch hands to the process groups."""
    from fastslow_scale.model.communication import step_traffic

    config = small_config(
        model={"num_key_value_heads": 4},
        parallel={"tensor_parallel_size": 2, "sequence_parallel": True, "zero_stage": 2},
    )
    assert planned_traffic(config, 2, 1000) == step_traffic(config, optimizer_groups(config), 2, 1000)


def test_the_command_prints_and_writes_a_plan(tmp_path: Path) -> None:
    said = fastslow("plan", "configs/1b.yaml", "--nodes", 8, "--gpu", "h100", "--json", tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert sum(part["whole"] for part in found["parameters"].values()) == 1_001_472_000
    assert "1,001,472,000" in said
    assert found["machine"]["flops"] == GPUS["h100"].bf16_flops
    assert found["config"]["fits"]
    assert found["budget"]["rank_hours"] == pytest.approx(64 * found["budget"]["hours"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h900"], "--gpu must be cpu or one of"),
        (["--gpus-per-node", 3], "parallel.tensor_parallel_size must divide the number of ranks"),
        (["--json", "/nonexistent/plan.json"], "cannot be written"),
        (["--network-gbits", "inf"], "--network-gbits must be a finite number"),
        (["train.max_steps=" + 400 * "9"], "train.max_steps must be less than 2^63"),
    ],
)
def test_mistakes_are_one_line(arguments: list[object], words: str) -> None:
    if words == "cannot be written":
        assert words in fastslow("plan", "configs/tiny.yaml", "--gpus-per-node", 2, *arguments, status=2)
    else:
        assert words in refused("plan", "configs/tiny.yaml", *arguments)


def test_a_config_that_does_not_divide_is_told_a_layout_that_does() -> None:
    said = refused("plan", "configs/1b.yaml", "--nodes", 512)
    assert "4 x 2048 (got 512 for 4096 ranks" in said
    assert "a layout that can run there: TP 8 x DP 512" in said

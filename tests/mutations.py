"""Breaks a copy of the code in known ways, one at a time, and shows that the tests notice.

python -m tests.mutations            prints the table of docs/testing.md; exit status 1 if a break goes unnoticed
python -m tests.mutations norm       only the breaks whose description holds `norm`
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
COPIED = ("fastslow_scale", "data_pipeline", "tests", "configs", "benchmarks", "pyproject.toml")

MODEL = "tests/unit/test_model.py"
LOSS = "tests/unit/test_loss.py"
LAYOUTS = "tests/parallel/test_fuzz.py::test_eight_drawn_cases_equal_the_reference"
TRAINING = "tests/parallel/test_layouts.py::test_training_through_the_engine_equals_a_plain_loop[2]"
ENGINE = "tests/parallel/test_engine.py"
SAVER = "tests/parallel/test_saver.py"
SANITY = "tests/parallel/test_sanity.py"
PROBE, STATISTICS_TEST = "tests/unit/test_probe.py", "tests/unit/test_statistics.py"
THEORY = "tests/unit/test_theory.py"
BAD_NUMBERS = "tests/integration/test_bad_numbers.py"
TIMELINE_TEST, MONITOR_TEST = "tests/unit/test_timeline.py", "tests/unit/test_monitor.py"
INSIDE, RUN_LOCK_TEST = "tests/unit/test_inside.py", "tests/unit/test_run_lock.py"
GPU_PATHS, PLAN_TEST = "tests/unit/test_gpu_paths.py", "tests/unit/test_plan.py"
EXPORT, IMPORT_TEST = "tests/unit/test_export.py", "tests/unit/test_import.py"


@dataclass(frozen=True)
class Break:
    """In `file`, the one place that reads `old` reads `new`; `tests` must then fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


COLLECTIVES, COUPLING = "fastslow_scale/parallel/collectives.py", "fastslow_scale/model/coupling.py"
STATISTICS = "fastslow_scale/study/statistics.py"
WINDOW, WINDOW_TEST = "fastslow_scale/model/window.py", "tests/unit/test_window.py"
COMPILED, COMPILED_TEST = "fastslow_scale/model/compiled.py", "tests/unit/test_compiled.py"
HF_MODEL = "fastslow_scale/inference/hf/modeling_fastslow.py"
HF_TOKENIZER = "fastslow_scale/inference/hf/tokenization_fastslow.py"
IMPORT = "fastslow_scale/inference/import_llama.py"
STATIONARY, SLOW_FAST = "fastslow_scale/study/stationary.py", "fastslow_scale/study/slow_fast.py"
TIMELINE, ENGINE_CODE, LOOP = (f"fastslow_scale/train/{name}.py" for name in ("timeline", "engine", "loop"))
TENSORBOARD, PROFILER = (f"fastslow_scale/monitor/{name}.py" for name in ("tensorboard", "profiler"))
BREAKS = [
    Break(
        "norm gradients not summed under sequence parallelism",
        "fastslow_scale/model/norm.py",
        "complete_grad(self.weight, self.group)",
        "self.weight",
        LAYOUTS,
    ),
    Break(
        "norm gradients averaged instead of summed",
        COLLECTIVES,
        "return _all_reduce(grad, ctx.group), None",
        "return _all_reduce(grad, ctx.group) / ctx.group.size(), None",
        LAYOUTS,
    ),
    Break(
        "slow state spread over its own block (shift by 0)",
        COLLECTIVES,
        "F.pad(c, (0, 0, 0, 0, 1, max(0, stop_block - 1 - c.shape[0])))",
        "F.pad(c, (0, 0, 0, 0, 0, max(0, stop_block - c.shape[0])))",
        MODEL,
    ),
    Break(
        "pool divides by P - 1",
        COLLECTIVES,
        "return (sums / pool_size).to(x.dtype)",
        "return (sums / (pool_size - 1)).to(x.dtype)",
        MODEL,
    ),
    Break(
        "pool takes in other documents' tokens",
        COUPLING,
        "pool(x * documents.pooled, ",
        "pool(x * 1, ",
        MODEL,
    ),
    Break(
        "the mean over a document's own tokens divides by P",
        COUPLING,
        "p * self.pool_size / documents.counted",
        "p",
        MODEL,
    ),
    Break(
        "feedback reaches into the next document",
        COUPLING,
        "own = own * documents.served",
        "own = own * 1",
        MODEL,
    ),
    Break(
        "slow attention sees other documents",
        COUPLING,
        "attends = [documents.blocks.attend] * len(self.slow_layers)",
        "attends = None",
        MODEL,
    ),
    Break(
        "pool does not sum over ranks",
        COLLECTIVES,
        "sums = _ReduceForward.apply(sums, group)",
        "sums = sums.clone()",
        LAYOUTS,
    ),
    Break(
        "pool all-reduces in both directions",
        COLLECTIVES,
        "return grad, None",
        "return _all_reduce(grad, dist.group.WORLD), None",
        LAYOUTS,
    ),
    Break(
        "gradient of c not summed over ranks",
        COLLECTIVES,
        "c = _ReduceBackward.apply(c, group)",
        "c = c.clone()",
        LAYOUTS,
    ),
    Break(
        "incomplete last block pooled as well",
        COUPLING,
        "num_blocks, documents = tokens.total // self.pool_size,",
        "num_blocks, documents = -(-tokens.total // self.pool_size),",
        MODEL,
    ),
    Break(
        "first token of a rank taken as 0",
        "fastslow_scale/model/model.py",
        "x.shape[0] * self.mesh.tp_rank if self.sequence_parallel else 0",
        "0",
        LAYOUTS,
    ),
    Break(
        "gate not zero at the start",
        COUPLING,
        "nn.Parameter(torch.zeros(model.hidden_size, dtype=dtype))",
        "nn.Parameter(0.02 * torch.randn(model.hidden_size, dtype=dtype))",
        MODEL,
    ),
    Break(
        "attention sees what follows",
        "fastslow_scale/model/attention.py",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != groups)",
        "F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != groups)",
        MODEL,
    ),
    Break(
        "frozen exchanges learn",
        "fastslow_scale/model/model.py",
        'if variant == "frozen":',
        'if variant == "never":',
        f"{MODEL} {ENGINE}::test_twenty_steps_of_frozen_equal_dense_bit_for_bit",
    ),
    Break(
        "vocabulary padding predicted",
        "fastslow_scale/model/loss.py",
        "logits[:, own:] = -torch.inf",
        "pass",
        LOSS,
    ),
    Break(
        "gradient of the head's input not summed over ranks",
        "fastslow_scale/model/model.py",
        "return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)",
        "return hidden",
        LAYOUTS,
    ),
    Break(
        "replicated weights counted on every rank in the norm",
        "fastslow_scale/train/engine.py",
        "(mesh.tp_rank == 0 or sharded_dim(p) is not None)",
        "(mesh.tp_rank >= 0)",
        TRAINING,
    ),
    Break(
        "a replicated weight declared as sharded",
        "fastslow_scale/model/norm.py",
        "self.weight = nn.Parameter(torch.ones(size, dtype=dtype))",
        "self.weight = nn.Parameter(torch.ones(size, dtype=dtype)); self.weight.tensor_model_parallel = True; "
        "self.weight.partition_dim = 0",
        f"{TRAINING} {SANITY}::test_declarations_of_every_weight",
    ),
    Break(
        "micro-batches not scaled",
        "fastslow_scale/train/engine.py",
        "self.accumulation * self.mesh.dp_size / valid_tokens",
        "self.mesh.dp_size / valid_tokens",
        TRAINING,
    ),
    Break(
        "valid tokens counted by each rank for itself",
        "fastslow_scale/train/batch.py",
        "dist.all_reduce(count, group=mesh.dp_group)",
        "pass",
        TRAINING,
    ),
    Break(
        "micro-batches summed in bf16",
        "fastslow_scale/train/engine.py",
        '"data_types": {"grad_accum_dtype": "fp32"}',
        '"data_types": {"grad_accum_dtype": "bf16"}',
        f"{ENGINE}::test_bf16_sums_over_micro_batches_in_fp32",
    ),
    Break(
        "a non-finite gradient applied",
        "fastslow_scale/train/engine.py",
        "if not math.isfinite(norm):",
        "if False:",
        f"{ENGINE}::test_a_broken_gradient_on_one_rank_changes_no_weight_on_any",
    ),
    Break(
        "replicas not compared over tensor-parallel ranks",
        "fastslow_scale/parallel/sanity.py",
        'found = [difference([*replicated, *states.items()], mesh.tp_group, "tensor-parallel")]',
        "found: list[str | None] = []",
        f"{SANITY}::test_one_changed_bit_is_named_with_its_ranks",
    ),
    Break(
        "a snapshot is the engine's own memory",
        "fastslow_scale/train/host_buffers.py",
        "            return buffer\n",
        "            return tensor\n",
        SAVER,
    ),
    Break(
        "a failed save raises on each rank as soon as that rank knows",
        "fastslow_scale/train/saver.py",
        "raise_at = 1 + max(self._ranks.gather(passed))",
        "raise_at = 0",
        SAVER,
    ),
    Break(
        "weights of another run are not handed to the model",
        "fastslow_scale/train/init_from.py",
        "engine_state.push_masters()",
        "pass",
        "tests/parallel/test_reshard.py::test_a_coupled_run_starts_as_the_dense_one_whose_weights_it_takes",
    ),
    Break(
        "a loss that is not finite is left to the gradient",
        "fastslow_scale/train/engine.py",
        "scale = scale + 0 * loss_sum.detach()",
        "scale = scale + 0",
        BAD_NUMBERS,
    ),
    Break(
        "a spike is skipped by the ranks that see it in their own loss",
        "fastslow_scale/train/batch.py",
        "dist.all_reduce(mean, group=mesh.dp_group)",
        "pass",
        BAD_NUMBERS,
    ),
    Break(
        "a rank acts on its own signals only",
        "fastslow_scale/train/loop.py",
        "dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
        "pass",
        "tests/integration/test_faults.py::test_a_signal_to_one_rank_stops_all_at_a_checkpoint",
    ),
    Break(
        "the hash of a file is not compared",
        "fastslow_scale/train/checkpoint_files.py",
        'if _sha256(file) != entry["sha256"]:',
        "if False:",
        "tests/unit/test_checkpoint_files.py::test_a_flipped_bit_in_any_file_is_found_and_the_file_named",
    ),
    Break(
        "a skipped document leaves its first tokens behind",
        "data_pipeline/encode.py",
        "            self._file.truncate()\n",
        "            self._file.seek(0, 2)\n",
        "tests/unit/data/test_encode.py::test_a_fault_takes_back_the_document_that_was_begun",
    ),
    Break(
        "an interrupted run trusts a file that was written again",
        "data_pipeline/units.py",
        "extent.file.size, extent.file.stamp,",
        "extent.file.size,",
        "tests/unit/data/test_encode.py::test_a_file_that_was_written_again_is_read_again",
    ),
    Break(
        "an interrupted run trusts a part that is not whole",
        "data_pipeline/spool.py",
        "num_bytes == summary.tokens * dtype.itemsize and",
        "",
        "tests/unit/data/test_encode.py::test_a_part_that_is_not_whole_is_not_trusted",
    ),
    Break(
        "a zst that was cut off taken as whole",
        "data_pipeline/streams.py",
        "                        raise EOFError\n",
        "                        return 0\n",
        "tests/unit/data/test_inputs.py::test_a_bad_file_is_named_with_its_line",
    ),
    Break(
        "a line at the edge of a part belongs to nobody",
        "data_pipeline/readers.py",
        "stream.seek(extent.start - 1)\n        position = extent.start - 1 + len",
        "stream.seek(extent.start)\n        position = extent.start + len",
        "tests/unit/data/test_inputs.py::test_parts_of_a_file_give_each_document_once",
    ),
    Break(
        "best fit takes the emptiest row",
        "data_pipeline/best_fit.py",
        "place = bisect.bisect_left(rooms, length)\n            if place == len(rooms)",
        "place = len(rooms) - (bool(rooms) and rooms[-1] >= length)\n            if place == len(rooms)",
        "tests/unit/data/test_packing.py::test_bins_are_those_of_best_fit_decreasing",
    ),
    Break(
        "rests of long documents lose their context",
        "data_pipeline/packing.py",
        "if start and filled == 1",
        "if False and filled == 1",
        "tests/unit/data/test_packing.py::test_best_fit_rows_hold_whole_documents",
    ),
    Break(
        "copies found by half of the hash",
        "data_pipeline/packing.py",
        "is_copy = (lot[first] == lot[second]) & (",
        "is_copy = (",
        "tests/unit/data/test_packing.py::test_digests_that_share_a_half_are_no_copies",
    ),
    Break(
        "long texts cut anywhere",
        "data_pipeline/cutting.py",
        "    if available < LINE_CHARACTERS:\n        return 0\n",
        "    return start + PIECE_CHARACTERS\n",
        "tests/unit/data/test_packing.py::test_cuts_change_no_id",
    ),
    Break(
        "the group inverse is the pseudo-inverse",
        STATIONARY,
        "np.linalg.inv(generator + projector) - projector",
        "np.linalg.pinv(generator)",
        f"{THEORY}::test_the_first_order_manifold_leaves_order_eps_squared",
    ),
    Break(
        "the group inverse has the other sign",
        STATIONARY,
        "np.linalg.inv(generator + projector) - projector",
        "projector - np.linalg.inv(generator + projector)",
        f"{THEORY}::test_the_group_inverse_is_minus_the_integral_of_what_is_not_yet_stationary",
    ),
    Break(
        "eps forgotten in the first-order manifold",
        SLOW_FAST,
        "stationary + eps * np.einsum",
        "stationary + np.einsum",
        f"{THEORY}::test_the_first_order_manifold_leaves_order_eps_squared",
    ),
    Break(
        "the initial layer counts as distance",
        SLOW_FAST,
        "late = path.time >= LAYER",
        "late = path.time >= 0",
        f"{THEORY}::test_distance_to_the_stationary_distribution_is_of_order_eps",
    ),
    Break(
        "the null space of the transposed generator",
        STATIONARY,
        "np.linalg.svd(generator)",
        "np.linalg.svd(generator.swapaxes(-1, -2))",
        f"{THEORY}::test_three_ways_to_the_stationary_distribution",
    ),
    Break(
        "phi off the simplex",
        "fastslow_scale/study/variational.py",
        "torch.softmax(self.down(F.silu(self.up(y))), dim=-1)",
        "self.down(F.silu(self.up(y)))",
        f"{THEORY}::test_phi_finds_the_stationary_distribution_on_points_it_never_saw",
    ),
    Break(
        "a second closed class goes unnoticed",
        STATIONARY,
        "if (sizes[..., -2] <= SINGULAR * sizes[..., 0]).any():",
        "if False:",
        f"{THEORY}::test_a_reducible_generator_is_reported",
    ),
    Break(
        "the shuffled control hears of its own sequence",
        COUPLING,
        "return c.roll(1, dims=1)",
        "return c.roll(0, dims=1)",
        PROBE,
    ),
    Break(
        "a probe leaves the gates closed",
        "fastslow_scale/study/probe.py",
        "            gate.copy_(value)",
        "            pass",
        PROBE,
    ),
    Break(
        "slow gradients clipped by the norm of all",
        "fastslow_scale/train/engine.py",
        "self.grad_clip / (own + 1e-6)",
        "self.grad_clip / (norm + 1e-6)",
        "tests/parallel/test_layouts.py::test_gradients_of_the_slow_path_clipped_apart_equal_a_plain_loop",
    ),
    Break(
        "equivalence judged by the wrong tail",
        STATISTICS,
        "max(-(mean + margin), mean - margin)",
        "min(-(mean + margin), mean - margin)",
        STATISTICS_TEST,
    ),
    Break(
        "intervals with one degree of freedom too many",
        STATISTICS,
        "freedom = count - 1\n        p_difference",
        "freedom = count\n        p_difference",
        STATISTICS_TEST,
    ),
    Break(
        "a verdict without looking at the margin first",
        STATISTICS,
        "if -margin < interval_90[0] and interval_90[1] < margin:",
        "if -margin < interval_95[0] and interval_95[1] < margin:",
        STATISTICS_TEST,
    ),
    Break(
        "attention's FLOPs counted once instead of twice",
        "fastslow_scale/model/flops.py",
        "4 * seen * heads * size",
        "2 * seen * heads * size",
        "tests/unit/test_flops.py",
    ),
    Break(
        "a window one token too wide",
        WINDOW,
        "(distance < cut.window)",
        "(distance <= cut.window)",
        WINDOW_TEST,
    ),
    Break(
        "a window's chunks see other documents",
        WINDOW,
        "chunks = chunks & (asking[:, :, None] == found[:, None])",
        "chunks = chunks & (asking[:, :, None] >= found[:, None])",
        WINDOW_TEST,
    ),
    Break(
        "a window's query heads read another group's keys",
        WINDOW,
        "unflatten(1, (groups, -1))\n        return",
        "unflatten(1, (-1, groups)).transpose(1, 2)\n        return",
        WINDOW_TEST,
    ),
    Break(
        "a mask over all pairs of tokens for a window",
        WINDOW,
        "return max(self.window // 2, SMALLEST_CHUNK)",
        "return self.length",
        WINDOW_TEST,
    ),
    Break(
        "a loss that holds all the logits",
        "fastslow_scale/model/loss.py",
        "return max(FEWEST_TOKENS, CHUNK_ELEMENTS // rows)",
        "return 10**9",
        LOSS,
    ),
    Break(
        "norms left out of `train.compile`",
        COMPILED,
        "module.normalize = normalize",
        "module.normalize = rms_norm",
        COMPILED_TEST,
    ),
    Break(
        "the standard error of another metric of a task",
        "fastslow_scale/inference/evaluate_tasks.py",
        'values.get(f"{name}_stderr,{answers}")',
        'values.get(f"acc_norm_stderr,{answers}")',
        "tests/unit/test_evaluate_tasks.py::test_the_standard_error_is_that_of_a_mean",
    ),
    Break(
        "tasks answered by an export whose gates are shut",
        "fastslow_scale/inference/evaluate_tasks.py",
        "return model.float().to(local_device()).eval(), tokenizer",
        "[p.data.zero_() for name, p in model.named_parameters() if name.endswith('.gate')]\n    "
        "return model.float().to(local_device()).eval(), tokenizer",
        "tests/unit/test_evaluate_tasks.py::test_perplexity_is_that_of_our_own_sum",
    ),
    Break(
        "an export receives its own block's answer",
        HF_MODEL,
        "given = torch.cat([given, self.gate * phi], 1)",
        "given = torch.cat([self.gate * phi, given], 1)",
        f"{EXPORT}::test_logits_are_the_trainers",
    ),
    Break(
        "an export counts blocks from the padding",
        HF_MODEL,
        "positions = (real.cumsum(1) - 1).clamp(min=0)",
        "positions = torch.ones_like(real).cumsum(1) - 1",
        f"{EXPORT}::test_prompts_of_unequal_length_go_on_as_each_alone",
    ),
    Break(
        "an export pools padding",
        HF_MODEL,
        "(x * blocks.real[..., None]).to(begun.dtype)",
        "x.to(begun.dtype)",
        f"{EXPORT}::test_padding_changes_no_logit",
    ),
    Break(
        "an export forgets the block that is not complete",
        HF_MODEL,
        "memory.block_sum = sums[rows, blocks.ended]",
        "memory.block_sum = sums[rows, blocks.ended] * 0",
        f"{EXPORT}::test_greedy_generation_is_ours[coupled]",
    ),
    Break(
        "an export forgets what the last block gave",
        HF_MODEL,
        "memory.given = given[rows, blocks.ended]",
        "memory.given = given[:, 0]",
        f"{EXPORT}::test_greedy_generation_is_ours[coupled]",
    ),
    Break(
        "an export's slow layers forget earlier blocks",
        HF_MODEL,
        "                whole[:, :, : old.shape[2]] = old\n",
        "                pass\n",
        f"{EXPORT}::test_greedy_generation_is_ours[coupled]",
    ),
    Break(
        "an export's beams keep the slow states of others",
        HF_MODEL,
        "        for exchange in self.exchanges:\n            exchange.reorder(beam_idx)\n",
        "",
        f"{EXPORT}::test_beams_carry_their_slow_states_along",
    ),
    Break(
        "an export's window one token too wide",
        HF_MODEL,
        "< self.config.attention_window",
        "<= self.config.attention_window",
        f"{EXPORT}::test_prompts_of_unequal_length_go_on_as_each_alone[coupled-5]",
    ),
    Break(
        "an export loses the window of a dense model",
        "fastslow_scale/inference/export.py",
        "    if window is None:\n",
        "    if window != 1:\n",
        f"{EXPORT}::test_logits_are_the_trainers",
    ),
    Break(
        "an export keeps the order of fused rows",
        "fastslow_scale/inference/llama_names.py",
        "rows = weight.unflatten(0, (groups, per + 2, -1))",
        "rows = weight.unflatten(0, (per + 2, groups, -1)).transpose(0, 1)",
        f"{EXPORT}::test_logits_are_the_trainers",
    ),
    Break(
        "an exported tokenizer takes text for marks",
        HF_TOKENIZER,
        "    def tokenize(self, text: str, **kwargs: Any)",
        "    def _tokenize(self, text: str, **kwargs: Any)",
        f"{EXPORT}::test_the_tokenizer_gives_the_same_ids_for_every_text",
    ),
    Break(
        "an exported tokenizer leaves the word mark to sentencepiece",
        HF_TOKENIZER,
        "first, *rest = piece.split(WORD_MARK)",
        "first, *rest = [piece]",
        f"{EXPORT}::test_the_tokenizer_gives_the_same_ids_for_every_text",
    ),
    Break(
        "an exported tokenizer has a name that transformers knows",
        "fastslow_scale/inference/llama_names.py",
        '"sentencepiece.model"',
        '"tokenizer.model"',
        f"{EXPORT}::test_without_leave_to_run_its_code_no_other_tokenizer_takes_its_place",
    ),
    Break(
        "an import drops the base of the rotary positions",
        IMPORT,
        'float(rope.get("rope_theta") or described.get("rope_theta") or 10000.0)',
        "10000.0",
        IMPORT_TEST,
    ),
    Break(
        "an import mixes gate and up rows",
        "fastslow_scale/inference/llama_names.py",
        'GATE_UP, ("gate", "up")',
        'GATE_UP, ("up", "gate")',
        IMPORT_TEST,
    ),
    Break(
        "an import passes over unknown weights",
        IMPORT,
        'if not key.endswith("rotary_emb.inv_freq")',
        'if "bias" not in key',
        IMPORT_TEST,
    ),
    Break(
        "watching: a part inside another counts for both",
        TIMELINE,
        "        self._close_mark()\n        self._open.append(name)\n",
        "        self._open.append(name)\n",
        TIMELINE_TEST,
    ),
    Break(
        "watching: waiting for ranks counts for whoever waits",
        TIMELINE,
        'with timeline.part("communication"):',
        "with contextlib.nullcontext():",
        TIMELINE_TEST,
    ),
    Break(
        "watching: collectives of other threads count as the step's",
        TIMELINE,
        "if threading.get_ident() != own and not in_backward:",
        "if False:",
        TIMELINE_TEST,
    ),
    Break(
        "watching: collectives stay timed after the step",
        TIMELINE,
        "            Work.wait = wait  # type: ignore[method-assign]\n",
        "            pass\n",
        TIMELINE_TEST,
    ),
    Break(
        "watching: a step's parts carry over into the next one",
        TIMELINE,
        'self._marks, self._open, self._since = [], ["other"], self._now()',
        'self._open, self._since = ["other"], self._now()',
        TIMELINE_TEST,
    ),
    Break(
        "watching: the wait for data is shared out among the other parts",
        TIMELINE,
        "scale = (step_seconds - data_seconds) /",
        "scale = step_seconds /",
        TIMELINE_TEST,
    ),
    Break(
        "watching: the wait for data is marked as something else",
        LOOP,
        'self.engine.timeline.part("data")',
        'self.engine.timeline.part("other")',
        f"{INSIDE}::test_every_part_of_a_step_is_measured_where_it_happens",
    ),
    Break(
        "watching: the backward counts as forward",
        ENGINE_CODE,
        'with self.timeline.part("backward"):',
        'with self.timeline.part("forward"):',
        f"{INSIDE}::test_every_part_of_a_step_is_measured_where_it_happens",
    ),
    Break(
        "watching: the update counts as backward",
        ENGINE_CODE,
        'with self.timeline.part("optimizer"):',
        'with self.timeline.part("backward"):',
        f"{INSIDE}::test_every_part_of_a_step_is_measured_where_it_happens",
    ),
    Break(
        "watching: slow states are those of an earlier step",
        LOOP,
        "            exchange.measure = True\n",
        "            pass\n",
        f"{INSIDE}::test_what_is_shown_is_that_of_the_validation_sequences",
    ),
    Break(
        "watching: every gate's histogram is the first one's",
        LOOP,
        'f"gate/{k}": gate.detach()',
        'f"gate/{k}": gates[0].detach()',
        f"{INSIDE}::test_what_is_shown_is_that_of_the_validation_sequences",
    ),
    Break(
        "watching: the loss by position takes padding in",
        LOOP,
        "losses.masked_fill(labels == IGNORE, math.nan).nanmean(dim=0)",
        "losses.mean(dim=0)",
        f"{INSIDE}::test_what_is_shown_is_that_of_the_validation_sequences",
    ),
    Break(
        "watching: the picture of the loss is upside down",
        TENSORBOARD,
        "axes.plot(loss_by_position.numpy()",
        "axes.plot(-loss_by_position.numpy()",
        f"{INSIDE}::test_histograms_and_the_picture_hold_what_they_are_given",
    ),
    Break(
        "watching: histograms all lie at step 0",
        TENSORBOARD,
        'self._writer.add_histogram(f"coupling/{name}", value, step)',
        'self._writer.add_histogram(f"coupling/{name}", value, 0)',
        f"{INSIDE}::test_histograms_and_the_picture_hold_what_they_are_given",
    ),
    Break(
        "watching: the first page names curves that there are not",
        TENSORBOARD,
        '["coupling/gate_norm/.*"]',
        '["gates/.*"]',
        f"{INSIDE}::test_the_page_and_the_table_are_of_this_run",
    ),
    Break(
        "watching: every run's hyperparameters say coupled",
        TENSORBOARD,
        '"variant": config.model.variant',
        '"variant": "coupled"',
        f"{INSIDE}::test_the_page_and_the_table_are_of_this_run",
    ),
    Break(
        "watching: a resumed run's curves lose the step it starts from",
        TENSORBOARD,
        "purge_step = start_step + 1 if",
        "purge_step = start_step if",
        MONITOR_TEST,
    ),
    Break(
        "watching: a resumed run has a validation twice",
        "fastslow_scale/monitor/metrics.py",
        "        if step in self._validated:\n            return False\n",
        "",
        MONITOR_TEST,
    ),
    Break(
        "watching: a killed run's last curves are lost",
        TENSORBOARD,
        "        # run again.\n        self._writer.flush()\n",
        "        # run again.\n",
        MONITOR_TEST,
    ),
    Break(
        "watching: a profile begins a step late",
        PROFILER,
        "if number == self._first:",
        "if number == self._first + 1:",
        f"{INSIDE}::test_a_profile_holds_its_steps_and_names_what_they_spent_most_on",
    ),
    Break(
        "watching: a profile ends a step early",
        PROFILER,
        "if number == self._last and",
        "if number == self._last - 1 and",
        f"{INSIDE}::test_a_profile_holds_its_steps_and_names_what_they_spent_most_on",
    ),
    Break(
        "watching: a profile names the operators with the least time",
        PROFILER,
        "reverse=True",
        "reverse=False",
        f"{INSIDE}::test_a_profile_holds_its_steps_and_names_what_they_spent_most_on",
    ),
    Break(
        "a killed rank's readers keep its successor out of the run folder",
        "fastslow_scale/train/run_lock.py",
        "fcntl.lockf(self._file",
        "fcntl.flock(self._file",
        RUN_LOCK_TEST,
    ),
    Break(
        "one chunk of logits still there when the next is made",
        "fastslow_scale/model/loss.py",
        "            del losses, probabilities, grad_logits  # before the next chunk's logits are made\n",
        "",
        LOSS,
    ),
    Break(
        "slow attention not held to the kernel that keeps replicas equal",
        "fastslow_scale/model/slow_path.py",
        "y = layer(y, rope, exactly(attend))",
        "y = layer(y, rope, attend)",
        GPU_PATHS,
    ),
    Break(
        "gradients summed over ranks in bf16",
        ENGINE_CODE,
        '"communication_data_type": "fp32"',
        '"communication_data_type": "bf16"',
        f"{SANITY}::test_the_ledger_equals_the_formula",
    ),
    Break(
        "a rank beyond the last GPU takes one all the same",
        "fastslow_scale/parallel/mesh.py",
        "if number >= count:",
        "if number > count:",
        GPU_PATHS,
    ),
    Break(
        "a cache locked through a file that is open for reading",
        "data_pipeline/cache.py",
        '(self.folder / _LOCK).open("r+b")',
        '(self.folder / _LOCK).open("rb")',
        "tests/unit/data/test_cache.py",
    ),
    Break(
        "a silent rank named again and again",
        "fastslow_scale/train/heartbeat.py",
        "self._seen[rank] = beat, math.inf",
        "self._seen[rank] = beat, since",
        "tests/unit/test_heartbeat.py",
    ),
    Break(
        "plan: new weights gathered beside the backward",
        "fastslow_scale/plan/roofline.py",
        '(stage == 2 and kind != "all_gather")',
        "stage == 2",
        PLAN_TEST,
    ),
    Break(
        "plan: without ZeRO each rank updates its share only",
        "fastslow_scale/plan/roofline.py",
        "share = trained / (dp if config.parallel.zero_stage else 1)",
        "share = trained / dp",
        PLAN_TEST,
    ),
    Break(
        "plan: the copies of a window's keys left out",
        "fastslow_scale/plan/activations.py",
        "copies = 2 * met * pairs * size",
        "copies = 0",
        PLAN_TEST,
    ),
]


def main(wanted: str) -> int:
    print("| break | where | noticed by |", "|---|---|---|", sep="\n", flush=True)
    missed = 0
    for one in BREAKS:
        if wanted in one.what:
            noticed = failing_test(one)
            missed += noticed is None
            print(f"| {one.what} | `{one.file}` | {f'`{noticed}`' if noticed else '**nothing**'} |", flush=True)
    return 1 if missed else 0


def failing_test(one: Break) -> str | None:
    """The first test that fails with this break, or None where all pass."""
    with tempfile.TemporaryDirectory(prefix="mutation_") as name:
        copy = Path(name)
        for item in COPIED:
            source = REPOSITORY / item
            if source.is_dir():
                shutil.copytree(source, copy / item, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / item)
        file = copy / one.file
        text = file.read_text()
        assert text.count(one.old) == 1, f"{one.what}: {one.file} must hold once: {one.old}"
        file.write_text(text.replace(one.old, one.new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            *one.tests.split(),
        ]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return failed[0].split("::", 1)[1] if failed else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))

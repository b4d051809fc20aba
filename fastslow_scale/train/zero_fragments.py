"""Where DeepSpeed keeps each parameter's fp32 master weight and AdamW moments: the one file that knows its internals.

Every ZeRO stage keeps them in other tensors, flattened, padded and cut over the data-parallel ranks. An `EngineState`
hides that behind fragments: elements [start, start + count) of a flattened local parameter (this rank's
tensor-parallel shard) are `owner[offset : offset + count]`, and AdamW's state for them lies under the same owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from fastslow_scale.train.checkpoint_reader import MOMENTS, WEIGHTS

_KNOWN_VERSION = "0.19.8"
_ZERO_3, _ZERO_1_AND_2, _BF16 = "DeepSpeedZeroOptimizer_Stage3", "DeepSpeedZeroOptimizer", "BF16_Optimizer"


@dataclass(frozen=True, eq=False)
class Fragment:
    """A run of one parameter's elements that this rank holds."""

    name: str
    shape: tuple[int, ...]  # of the local parameter, whole even where ZeRO-3 has cut it
    owner: torch.Tensor
    offset: int
    start: int
    count: int
    trained: bool = True  # False: outside the optimizer, without moments; the owner has the weights' own dtype
    on_every_dp_rank: bool = False  # True: all data-parallel ranks hold the same; False: each holds a part of its own


@dataclass(frozen=True)
class _Layout:
    """What a ZeRO stage makes of the parameters in the optimizer."""

    trained: set[Parameter]
    fragments: list[Fragment]
    owners: list[torch.Tensor]  # all of AdamW's tensors on this rank, those that hold only padding included


class EngineState:
    """The master weights and AdamW moments of a DeepSpeed engine: ZeRO 0 (fp32) and 1, 2, 3 (fp32, bf16).

    Raises:
        RuntimeError: this set-up of the engine is not supported, or DeepSpeed's internals are not as they were known.
    """

    def __init__(self, engine: Any) -> None:
        self.parameters: dict[str, Parameter] = dict(engine.module.named_parameters())
        _refuse_buffers(engine.module)
        self._wrapper = engine.optimizer
        self._adam: torch.optim.Optimizer = _internal(engine, "basic_optimizer")
        _require(isinstance(self._adam, torch.optim.AdamW), f"the optimizer is {type(self._adam).__name__}, not AdamW")
        self._layout = _layout_of(engine, {parameter: name for name, parameter in self.parameters.items()})
        known = set(self.parameters.values())
        _require(self._layout.trained <= known, "the optimizer holds parameters that the model does not name")
        self.fragments = self._layout.fragments + [
            _outside_fragment(name, parameter)
            for name, parameter in self.parameters.items()
            if parameter not in self._layout.trained and _local_shape(parameter).numel() > 0
        ]

    def is_trained(self, name: str) -> bool:
        """Whether the parameter belongs to the optimizer."""
        return self.parameters[name] in self._layout.trained

    def local_shape(self, name: str) -> torch.Size:
        """The shape of this rank's tensor-parallel shard."""
        return _local_shape(self.parameters[name])

    def view(self, fragment: Fragment, kind: str) -> torch.Tensor | None:
        """The fragment's elements, shape [count], as the engine's own memory. None: there is no such moment."""
        whole = fragment.owner if kind == WEIGHTS else self._adam.state.get(fragment.owner, {}).get(kind)
        return None if whole is None else whole.detach().reshape(-1).narrow(0, fragment.offset, fragment.count)

    def adam_step(self, name: str) -> int | None:
        """How many steps AdamW took on a parameter; None: it never took one. ZeRO's flat tensors step together."""
        if not self.is_trained(name):
            return None
        owner = self.parameters[name] if self._owners_are_parameters else self._layout.owners[0]
        state = self._adam.state.get(owner)
        return int(state["step"].item()) if state else None

    def set_adam_steps(self, steps: Mapping[str, int | None]) -> None:
        """Makes AdamW's state that of `steps[name]` steps for every parameter, its moments still to be filled in."""
        if self._owners_are_parameters:
            for name in filter(self.is_trained, self.parameters):
                self._set_adam_step(self.parameters[name], steps[name])
        else:
            together = max((step for step in steps.values() if step is not None), default=None)
            for owner in self._layout.owners:
                self._set_adam_step(owner, together)

    def push_masters(self) -> None:
        """Copies the masters into the weights that the model computes with. All ranks call it together."""
        wrapper = self._wrapper
        if type(wrapper).__name__ == _ZERO_3:
            # The gathered copies of small parameters are dropped first and gathered anew last, or they would stay old.
            wrapper.checkpoint_event_prologue()
            for group in range(len(wrapper.fp16_groups)):
                _internal(wrapper, "_reassign_or_swap_out_partitioned_parameters")(group)
            wrapper.checkpoint_event_epilogue()
        elif not self._owners_are_parameters:
            _internal(wrapper, "update_lp_params")()

    @property
    def _owners_are_parameters(self) -> bool:
        return self._wrapper is self._adam

    def _set_adam_step(self, owner: torch.Tensor, step: int | None) -> None:
        state = self._adam.state
        if step is None:
            state.pop(owner, None)
            return
        if not state.get(owner):  # torch makes it at the first step only
            on_device = any(group.get("fused") or group.get("capturable") for group in self._adam.param_groups)
            state[owner] = {
                "step": torch.zeros((), dtype=torch.float32, device=owner.device if on_device else "cpu"),
                **{moment: torch.zeros_like(owner, requires_grad=False) for moment in MOMENTS},
            }
        state[owner]["step"].fill_(step)


def require_step_boundary(engine: Any) -> None:
    """Raises RuntimeError between two micro-batches of one step: gradients accumulated so far are not saved."""
    if engine.micro_steps % engine.gradient_accumulation_steps():
        raise RuntimeError("a checkpoint can only be saved between two steps, not inside gradient accumulation")


def read_counters(engine: Any) -> dict[str, int]:
    """How far the engine has counted, independent of the number of micro-batches a step."""
    return {
        "global_steps": int(engine.global_steps),
        "global_samples": int(engine.global_samples),
        "skipped_steps": int(engine.skipped_steps),
        "accumulated_steps": int(engine.micro_steps) // int(engine.gradient_accumulation_steps()),
    }


def write_counters(engine: Any, counters: Mapping[str, int]) -> None:
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, counters[name])
    engine.micro_steps = counters["accumulated_steps"] * engine.gradient_accumulation_steps()


def _layout_of(engine: Any, names: Mapping[Parameter, str]) -> _Layout:
    wrapper = engine.optimizer
    kind = type(wrapper).__name__  # importing DeepSpeed for its classes would cost every user of this module seconds
    if kind == _ZERO_3:
        return _zero3_layout(wrapper, names)
    if kind == _ZERO_1_AND_2:
        _require(not wrapper.cpu_offload, "optimizer offload is not supported")
        _require(not wrapper.round_robin_gradients, "round_robin_gradients is not supported")
        masters = _internal(wrapper, "single_partition_of_fp32_groups")
        return _flat_layout(wrapper, wrapper.bit16_groups, wrapper.bit16_groups_flat, masters, names)
    if kind == _BF16:
        masters = _internal(wrapper, "fp32_groups_flat_partition")
        return _flat_layout(wrapper, wrapper.bf16_groups, wrapper.bf16_groups_flat, masters, names)
    _require(wrapper is engine.basic_optimizer, f"{kind} (bf16 or fp16 with ZeRO-0) is not supported")
    return _plain_layout(wrapper, names)


def _zero3_layout(wrapper: Any, names: Mapping[Parameter, str]) -> _Layout:
    """Every parameter is cut into equal pieces, the last one padded; a rank's pieces of a group lie in one tensor."""
    _require(not wrapper.offload_optimizer and not wrapper.offload_param, "offload is not supported")
    groups, masters = _internal(wrapper, "fp16_groups"), _internal(wrapper, "fp32_partitioned_groups_flat")
    _require(len(groups) == len(masters), "ZeRO-3 groups and masters do not match")
    fragments = []
    for group, master in zip(groups, masters, strict=True):
        offset = 0
        for parameter in group:
            piece = _internal(parameter, "ds_tensor")
            start, count = _zero3_range(parameter)
            if count:
                shape = tuple(_local_shape(parameter))
                fragments.append(Fragment(names[parameter], shape, master, offset, start, count))
            offset += piece.ds_numel
        _require(offset == master.numel(), "ZeRO-3 masters do not add up to their group")
    return _Layout({parameter for group in groups for parameter in group}, fragments, list(masters))


def _flat_layout(
    wrapper: Any,
    groups: Iterable[list[Parameter]],
    flat_weights: Iterable[torch.Tensor],
    masters: Iterable[torch.Tensor],
    names: Mapping[Parameter, str],
) -> _Layout:
    """ZeRO-1, ZeRO-2, BF16_Optimizer: the parameters are views of one tensor a group, which is cut in equal parts."""
    fragments, trained, owners = [], set(), []
    dp_groups = _internal(wrapper, "real_dp_process_group")
    for group, flat, master, dp_group in zip(groups, flat_weights, masters, dp_groups, strict=True):
        covered = master.numel() * dist.get_world_size(dp_group)
        _require(covered == flat.numel(), "ZeRO masters do not cover their group")
        low = master.numel() * dist.get_rank(dp_group)
        for parameter in group:
            same_storage = parameter.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            _require(same_storage and parameter.is_contiguous(), f"{names[parameter]} is no view of its flat group")
            place = int(parameter.storage_offset() - flat.storage_offset())
            first, last = max(place, low), min(place + parameter.numel(), low + master.numel())
            if first < last:
                shape = tuple(parameter.shape)
                fragments.append(
                    Fragment(names[parameter], shape, master, first - low, first - place, last - first),
                )
        trained.update(group)
        owners.append(master)
    return _Layout(trained, fragments, owners)


def _plain_layout(adam: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> _Layout:
    """ZeRO-0 in fp32: the parameters are their own masters, on every data-parallel rank."""
    owners = [parameter for group in adam.param_groups for parameter in group["params"] if parameter.requires_grad]
    _require(all(owner.dtype == torch.float32 for owner in owners), "ZeRO-0 is supported in fp32 only")
    fragments = [
        Fragment(names[owner], tuple(owner.shape), owner, 0, 0, owner.numel(), on_every_dp_rank=True)
        for owner in owners
        if owner.numel()
    ]
    return _Layout(set(owners), fragments, owners)


def _outside_fragment(name: str, parameter: Parameter) -> Fragment:
    """A parameter that no optimizer holds: whole on every rank, except that ZeRO-3 cuts it like any other."""
    shape = tuple(_local_shape(parameter))
    if hasattr(parameter, "ds_numel"):
        start, count = _zero3_range(parameter)
        return Fragment(name, shape, _internal(parameter, "ds_tensor"), 0, start, count, trained=False)
    _require(parameter.is_contiguous(), f"{name} is not contiguous")
    return Fragment(name, shape, parameter, 0, 0, parameter.numel(), trained=False, on_every_dp_rank=True)


def _zero3_range(parameter: Parameter) -> tuple[int, int]:
    """Start and number of the elements of a cut parameter on this rank, without the padding."""
    size: int = _internal(_internal(parameter, "ds_tensor"), "ds_numel")
    numel: int = _internal(parameter, "ds_numel")
    start = min(numel, size * dist.get_rank(_internal(parameter, "ds_process_group")))
    return start, min(size, numel - start)


def _local_shape(parameter: Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _refuse_buffers(module: torch.nn.Module) -> None:
    for path, part in module.named_modules():
        for name in part._buffers.keys() - part._non_persistent_buffers_set:
            _require(part._buffers[name] is None, f"{path}.{name} is a persistent buffer: only parameters are saved")


def _internal(holder: Any, name: str) -> Any:
    _require(hasattr(holder, name), f"{type(holder).__name__} has no {name}")
    return getattr(holder, name)


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise RuntimeError(
            f"DeepSpeed {version('deepspeed')}: {complaint} "
            f"(checkpoints rely on its internals as they are in {_KNOWN_VERSION})"
        )

"""Host memory that snapshots are copied into, the same from save to save.

Fresh memory of that size costs a page fault every few kilobytes, several times the copy itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

_CHUNK = 4 << 20  # elements


class HostBuffers:
    """One buffer a name. What was copied stays untouched until the same name is copied again."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where the tensors come from; pinned memory lets a GPU copy at full speed, without the CPU."""
        self._from_gpu = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}
        self._waiting: list[tuple[Any, Any]] = []

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, name: str, count: int) -> None:
        """Make room for `count` float32 numbers and touch every page of it."""
        self._buffers[name] = self._empty(torch.Size([count]), torch.float32).zero_()

    def copy(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What will be a copy of `tensor` in host memory, as `dtype`, after `complete`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != dtype:
            buffer = self._buffers[name] = self._empty(tensor.shape, dtype)
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
            source, target = tensor.view(-1).numpy(), buffer.view(-1).numpy()
            for start in range(0, len(source), _CHUNK):
                self._waiting.append((target[start : start + _CHUNK], source[start : start + _CHUNK]))
            return buffer
        return buffer.copy_(tensor, non_blocking=self._from_gpu)

    def complete(self) -> None:
        """Make all copies and wait until they have arrived."""
        if self._from_gpu:
            torch.cuda.current_stream().synchronize()
        # Torch would wait for all its threads after each tensor. Where other programs use the cores too, that made a
        # snapshot of hundreds of tensors several times slower; these threads meet once, at the end.
        waiting, self._waiting = self._waiting, []
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for _ in pool.map(lambda pair: np.copyto(*pair), waiting):
                pass

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._from_gpu)

"""Host memory that snapshots are copied into, the same from save to save.

Fresh memory of that size costs a page fault every few kilobytes, as much time again as the copy itself.
"""

from __future__ import annotations

import torch


class HostBuffers:
    """One buffer a name. What was copied stays untouched until the same name is copied again."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where the tensors come from; pinned memory lets a GPU copy at full speed, without the CPU."""
        self._from_gpu = device.type == "cuda"
        self._buffers: dict[str, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, name: str, count: int) -> None:
        """Make room for `count` float32 numbers and touch every page of it."""
        self._buffers[name] = self._empty(torch.Size([count]), torch.float32).zero_()

    def copy(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of `tensor` in host memory as `dtype`; valid after `complete`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != dtype:
            buffer = self._buffers[name] = self._empty(tensor.shape, dtype)
        return buffer.copy_(tensor.detach(), non_blocking=self._from_gpu)

    def complete(self) -> None:
        """Wait until all copies have arrived."""
        if self._from_gpu:
            torch.cuda.current_stream().synchronize()

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._from_gpu)

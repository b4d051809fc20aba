"""The state of torch's random number generators: kept in checkpoints, and made anew where the layout changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators of the CPU and, on a GPU, of `device`."""
    state = {"torch_rng": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Go on with the generators that `rng_state` saved; a GPU's only where there were GPUs then and are now."""
    torch.set_rng_state(state["torch_rng"])
    if device.type == "cuda" and "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"], device)


def derive_rng(seed: int, step: int, rank: int) -> None:
    """Seed the generators from what a run has at any layout; each rank and step has streams of its own."""
    key = hashlib.sha256(f"rng/{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(key[:8], "little", signed=True))

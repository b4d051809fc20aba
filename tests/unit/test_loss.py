"""The chunked, vocab-parallel cross-entropy against torch's and megatron's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.memory import LiveBytes
from fastslow_scale.model import loss as loss_module
from fastslow_scale.model.loss import IGNORE, VocabularySlice, cross_entropy_sum, token_losses
from fastslow_scale.parallel.mesh import Mesh, single_process_mesh
from tests.memory import LargestTensor

pytestmark = pytest.mark.unit

TOKENS, SIZE, ROWS, VOCAB = 37, 12, 48, 41


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return single_process_mesh()


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, SIZE, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(ROWS, SIZE, generator=g).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=g)
    labels[5:9] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [16, 32, 1000])
def test_equals_torch_in_float64(chunk: int, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", chunk * ROWS)
    monkeypatch.setattr(loss_module, "FEWEST_TOKENS", 1)
    vocabulary = VocabularySlice(0, ROWS, VOCAB, mesh.tp_group)
    hidden, weight, labels = problem(torch.float64)
    ours = cross_entropy_sum(hidden, weight, labels, vocabulary)
    assert ours.dtype == torch.float64
    (3.0 * ours).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    expected = F.cross_entropy((hidden @ weight.T)[:, :VOCAB], labels, ignore_index=IGNORE, reduction="sum")
    (3.0 * expected).backward()
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(grads[0], hidden.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[1], weight.grad, rtol=1e-12, atol=1e-12)
    assert (weight.grad[VOCAB:] == 0).all()
    each = token_losses(hidden, weight, labels, vocabulary)
    assert (each[5:9] == 0).all()
    torch.testing.assert_close(each.sum(), expected.detach(), rtol=1e-13, atol=0)


def test_no_tensor_holds_the_logits_of_all_tokens(mesh: Mesh) -> None:
    tokens, size, rows = 2048, 8, 8192
    hidden, weight = torch.ones(tokens, size, requires_grad=True), torch.ones(rows, size, requires_grad=True)
    with LargestTensor() as largest:
        loss = cross_entropy_sum(hidden, weight, torch.arange(tokens), VocabularySlice(0, rows, rows, mesh.tp_group))
        loss.backward()
    assert loss.item() == pytest.approx(tokens * math.log(rows), rel=1e-6)
    assert largest.bytes == 2**24, "16 MB, as promised; all logits would be 64 MB"


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 1), (torch.bfloat16, 1.5)])
def test_one_chunk_is_gone_before_the_next_is_made(dtype: torch.dtype, kept: float, mesh: Mesh) -> None:
    """In fp32 all is done in place; in bf16 the logits stand beside their fp32 copy. A tenth is for small tensors."""
    rows = 4096
    tokens = 4 * loss_module.chunk_tokens(rows)
    hidden, weight = torch.randn(tokens, 4).to(dtype), torch.randn(rows, 4).to(dtype)
    labels = torch.randint(0, rows, (tokens,))
    with LiveBytes() as live:
        cross_entropy_sum(hidden.requires_grad_(), weight.requires_grad_(), labels, vocabulary=whole(rows, mesh))
    assert live.peak < 1.1 * kept * 4 * loss_module.CHUNK_ELEMENTS


def whole(rows: int, mesh: Mesh) -> VocabularySlice:
    return VocabularySlice(0, rows, rows, mesh.tp_group)


def test_equals_megatron_in_float32(mesh: Mesh) -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    hidden, weight, labels = problem(torch.float32)
    labels = labels.clamp(min=0)
    ours = cross_entropy_sum(hidden, weight, labels, VocabularySlice(0, ROWS, ROWS, mesh.tp_group))
    theirs = vocab_parallel_cross_entropy((hidden @ weight.T).unsqueeze(1).clone(), labels.unsqueeze(1)).sum()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_bfloat16_is_summed_in_float32(mesh: Mesh) -> None:
    hidden, weight, labels = problem(torch.bfloat16)
    ours = cross_entropy_sum(hidden, weight, labels, VocabularySlice(0, ROWS, VOCAB, mesh.tp_group))
    assert ours.dtype == torch.float32
    ours.backward()
    assert weight.grad.dtype == torch.bfloat16
    logits = (hidden @ weight.T).float()[:, :VOCAB]
    torch.testing.assert_close(ours, F.cross_entropy(logits, labels, reduction="sum"), rtol=1e-5, atol=0)


def test_without_gradients_none_are_made(mesh: Mesh) -> None:
    hidden, weight, labels = problem(torch.float32)
    with torch.no_grad():
        assert not cross_entropy_sum(
            hidden, weight, labels, VocabularySlice(0, ROWS, VOCAB, mesh.tp_group)
        ).requires_grad


def test_an_infinite_loss_makes_the_gradient_non_finite(mesh: Mesh) -> None:
    hidden, weight, labels = problem(torch.float32)
    with torch.no_grad():
        hidden[0, 0] = torch.inf
    cross_entropy_sum(hidden, weight, labels, VocabularySlice(0, ROWS, VOCAB, mesh.tp_group)).backward()
    assert not torch.isfinite(weight.grad).all()
    assert not torch.isfinite(hidden.grad[-1]).all()

"""Attention to a window, in chunks, against the formula written out with a mask over all pairs of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from fastslow_scale.model.attention import causal_attention
from fastslow_scale.model.documents import Documents
from tests.memory import LargestTensor

pytestmark = pytest.mark.unit

BATCH, HEAD_DIM = 2, 6


def drawn(length: int, heads: int, groups: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v, and what the output is multiplied with to make a loss."""
    g = torch.Generator().manual_seed(length)
    q, k, v, weights = (
        torch.randn(BATCH, n, length, HEAD_DIM, generator=g, dtype=torch.float64)
        for n in (heads, groups, groups, heads)
    )
    return [q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_(), weights]


def documents_of(length: int) -> Documents:
    ends = torch.rand(BATCH, length, generator=torch.Generator().manual_seed(1)) < 0.05
    return Documents(ends.cumsum(1))


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, documents: Documents | None
) -> torch.Tensor:
    length, repeats = q.shape[2], q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeats, 1).mT / math.sqrt(HEAD_DIM)
    t = torch.arange(length)
    seen = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - window)
    if documents is not None:
        seen = seen & (documents.ids[:, None, :, None] == documents.ids[:, None, None, :])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.repeat_interleave(repeats, 1)


def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor], weights: torch.Tensor) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


LENGTHS_AND_WINDOWS = [
    (1, 1),
    (64, 4),
    (65, 4),
    (129, 1),
    (129, 2),
    (200, 7),
    (200, 64),
    (131, 65),
    (130, 65),
    (66, 65),
    (321, 128),
    (320, 160),
    (500, 161),
    (200, 199),
    (200, 200),
    (90, 1000),
]


@pytest.mark.parametrize("apart", [False, True], ids=["one", "documents"])
@pytest.mark.parametrize("heads, groups", [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("length, window", LENGTHS_AND_WINDOWS)
def test_equals_the_formula_in_float64(length: int, window: int, heads: int, groups: int, apart: bool) -> None:
    *inputs, weights = drawn(length, heads, groups)
    documents = documents_of(length) if apart else None
    attend = documents.attend if documents else causal_attention
    got = with_gradients(attend(*inputs, window), inputs, weights)
    expected = with_gradients(written_out(*inputs, window, documents), inputs, weights)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_narrow_dtypes_stay_near_float64(dtype: torch.dtype, error: float) -> None:
    """Scores, softmax and sums of order one: a few roundings of the dtype (2^-24, 2^-8)."""
    *inputs, weights = drawn(300, 4, 2, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    got = with_gradients(causal_attention(*inputs, 70), inputs, weights)
    expected = with_gradients(written_out(*wide, 70, None), wide, weights)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).abs().max() / other.abs().max() < error


@pytest.mark.parametrize("window", [3, 70])
def test_what_follows_changes_nothing_before(window: int) -> None:
    q, k, v, _ = drawn(210, 4, 2)
    before = causal_attention(q, k, v, window)
    for prefix in (1, 2, 63, 64, 65, 70, 71, 127, 128, 129, 134, 135, 209):
        changed = [torch.cat([x[:, :, :prefix], -3 * x[:, :, prefix:]], 2) for x in (q, k, v)]
        after = causal_attention(*changed, window)
        torch.testing.assert_close(after[:, :, :prefix], before[:, :, :prefix], rtol=0, atol=1e-13)
        assert (after[:, :, prefix] - before[:, :, prefix]).abs().min() > 1e-6


@pytest.mark.parametrize("apart", [False, True], ids=["one", "documents"])
def test_no_tensor_grows_with_the_square_of_the_length(apart: bool) -> None:
    window, largest = 16, []
    for length in (1024, 4096):
        *inputs, weights = drawn(length, 4, 2)
        attend = documents_of(length).attend if apart else causal_attention
        with LargestTensor() as count:
            with_gradients(attend(*inputs, window), inputs, weights)
        largest.append(count.bytes)
    assert largest[1] <= 4.3 * largest[0]
    # Between the size of an input, which shows that something was counted, and what a mask over all pairs would take.
    assert BATCH * 4 * 4096 * HEAD_DIM * 8 <= largest[1] < 4096**2

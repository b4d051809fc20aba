"""What `train.compile` compiles, against the same functions run eagerly."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from data_pipeline.errors import UserError
from fastslow_scale.model.compiled import compile_inner_parts
from fastslow_scale.model.documents import Documents
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from tests.configs import small_config

pytestmark = pytest.mark.unit


def test_without_a_compiler_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"train\.compile needs the C\+\+ compiler"):
        compile_inner_parts(torch.nn.Module())


@pytest.mark.slow
def test_compiled_training_equals_eager_training() -> None:
    """Losses and gradients, with everything that meets a compiled part: windows, documents, recomputation."""
    torch._dynamo.reset()
    counters.clear()
    mesh = single_process_mesh()
    tokens = torch.randint(0, 61, (2, 18), generator=torch.Generator().manual_seed(0))
    for changes, documents in (
        ({}, None),
        ({"train": {"recompute": "selective"}}, None),
        ({"model": {"attention_window": 3}, "train": {"recompute": "full"}}, Documents.of_tokens(tokens, 7)),
    ):
        eager, compiled = (build_model(small_config(**changes), mesh, torch.float32) for _ in range(2))
        compile_inner_parts(compiled)
        for model in (eager, compiled):
            for exchange in model.exchanges:
                exchange.gate.data.fill_(1.0)
        losses = [model(tokens, tokens, documents) for model in (eager, compiled)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
        for loss in losses:
            loss.backward()
        for (name, a), (_, b) in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
    # Queries, SwiGLU and norm, each for the fast and the slow layers' shape: one kernel for all layers and modes.
    assert counters["stats"]["unique_graphs"] == 6
    with torch.no_grad():
        assert torch.equal(compiled.logits(tokens), eager.logits(tokens))

"""The model on one process, against the maths, another library, and its own promises."""

from __future__ import annotations

import math

import pytest
import torch

from fastslow_scale.config import Config
from fastslow_scale.model.documents import Documents
from fastslow_scale.model.model import FastSlowModel, build_model
from fastslow_scale.parallel.mesh import Mesh, single_process_mesh
from tests import reference
from tests.configs import small_config

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return single_process_mesh()


def open_gates(model: FastSlowModel) -> None:
    """Random gates of order one: what a zero gate would hide shows."""
    generator = torch.Generator().manual_seed(5)
    for exchange in model.exchanges:
        exchange.gate.data.copy_(torch.randn(exchange.gate.shape, generator=generator))


def tokens_of(config: Config, length: int | None = None, batch: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.model.vocab_size, (batch, length or config.train.seq_length), generator=generator)


EOS = 0
APART = {"reset_at_document": True}


def with_documents(tokens: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """About every fifth token becomes the end of a document."""
    ends = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    return tokens.clamp(min=1).masked_fill(ends, EOS)


SHAPES = {
    "base": small_config(),
    "one exchange at the end": small_config(slow={"exchange_after": [3]}),
    "three exchanges": small_config(slow={"exchange_after": [1, 2, 3]}),
    "T divides into blocks": small_config(slow={"pool_size": 6}),
    "P beyond half of T": small_config(slow={"pool_size": 11}),
    "window": small_config(model={"attention_window": 3}),
    "window, in chunks": small_config(model={"attention_window": 5}, train={"seq_length": 71}),
    "window of one": small_config(model={"attention_window": 1}),
    "no grouping": small_config(model={"num_key_value_heads": 4}),
    "one key-value head": small_config(model={"num_key_value_heads": 1}),
    "narrow slow path": small_config(slow={"hidden_size": 8, "intermediate_size": 10, "num_key_value_heads": 1}),
    "no slow layers": small_config(slow={"num_layers": 0}),
    "two slow layers, fan_in": small_config(slow={"num_layers": 2, "initializer_range": "fan_in"}),
    "sizes without a common group": small_config(
        model={"intermediate_size": 26, "num_attention_heads": 4, "num_key_value_heads": 4},
        slow={"intermediate_size": 25},
    ),
    "tied embeddings": small_config(model={"tie_word_embeddings": True}),
    "odd vocabulary": small_config(model={"vocab_size": 57, "vocab_multiple": 16}),
    "dense": small_config(model={"variant": "dense"}),
    "documents": small_config(data=APART),
    "documents, three exchanges": small_config(data=APART, slow={"exchange_after": [1, 2, 3], "pool_size": 3}),
    "documents, window": small_config(data=APART, model={"attention_window": 3}),
    "documents, window, in chunks": small_config(data=APART, model={"attention_window": 5}, train={"seq_length": 71}),
    "documents, dense": small_config(data=APART, model={"variant": "dense"}),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_logits_and_gradients_equal_the_float64_reference(config: Config, mesh: Mesh) -> None:
    model = build_model(config, mesh, torch.float64)
    open_gates(model)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    tokens, labels = tokens_of(config), tokens_of(config, seed=1)
    labels[0, 3:5] = -100
    documents, numbers = None, None
    if config.data.reset_at_document:
        tokens = with_documents(tokens)
        documents, numbers = Documents.of_tokens(tokens, EOS), reference.documents_of(tokens, EOS)

    expected = reference.logits(weights, config, tokens, numbers)
    torch.testing.assert_close(model.logits(tokens, documents), expected, rtol=1e-11, atol=1e-11)

    loss = model(tokens, labels, documents)
    expected_loss = reference.loss_sum(weights, config, tokens, labels, numbers)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    loss.backward()
    expected_loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("pool_size", [3, 4, 7])
def test_what_follows_never_changes_what_came_before(pool_size: int, window: int | None, mesh: Mesh) -> None:
    config = small_config(slow={"pool_size": pool_size}, model={"attention_window": window})
    model = build_model(config, mesh, torch.float64)
    open_gates(model)
    length = 3 * pool_size + 2
    tokens = tokens_of(config, length)
    before = model.logits(tokens)
    for prefix in range(1, 3 * pool_size + 2):
        changed = tokens.clone()
        changed[:, prefix:] = (changed[:, prefix:] + 7) % config.model.vocab_size
        torch.testing.assert_close(model.logits(changed)[:, :prefix], before[:, :prefix], rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("pool_size", [2, 3, 5])
def test_a_document_knows_nothing_of_the_others(pool_size: int, window: int | None, mesh: Mesh) -> None:
    """At every prefix of every document: what is not of this document, or follows, changes nothing."""
    config = small_config(slow={"pool_size": pool_size}, model={"attention_window": window}, data=APART)
    model = build_model(config, mesh, torch.float64)
    open_gates(model)
    tokens = tokens_of(config, 24, batch=1).clamp(min=1)
    starts = [0, 1, 2, 7, 15, 16]
    tokens[0, starts[1:]] = EOS
    before = model.logits(tokens, Documents.of_tokens(tokens, EOS))
    for start, stop in zip(starts, [*starts[1:], tokens.shape[1]], strict=True):
        for prefix in range(start + 1, stop + 1):
            kept = torch.zeros_like(tokens, dtype=torch.bool)
            kept[:, start:prefix] = True
            changed = tokens.where(kept | (tokens == EOS), tokens % (config.model.vocab_size - 1) + 1)
            after = model.logits(changed, Documents.of_tokens(changed, EOS))
            assert (changed != tokens).any()
            torch.testing.assert_close(after[:, start:prefix], before[:, start:prefix], rtol=0, atol=1e-13)


def test_a_document_that_begins_on_the_grid_is_as_though_alone(mesh: Mesh) -> None:
    config = small_config(data=APART)
    model = build_model(config, mesh, torch.float64)
    open_gates(model)
    tokens = tokens_of(config, 40).clamp(min=1)
    start = 5 * config.slow.pool_size
    tokens[:, start] = EOS
    together = model.logits(tokens, Documents.of_tokens(tokens, EOS))[:, start:]
    torch.testing.assert_close(together, model.logits(tokens[:, start:]), rtol=1e-11, atol=1e-12)


def test_the_open_gate_reaches_every_token_after_the_first_block(mesh: Mesh) -> None:
    config = small_config()
    model = build_model(config, mesh, torch.float64)
    tokens = tokens_of(config)
    closed = model.logits(tokens)
    open_gates(model)
    changed = (model.logits(tokens) - closed).abs().amax((0, 2)) > 1e-9
    assert not changed[: config.slow.pool_size].any()
    assert changed[config.slow.pool_size :].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["coupled", "frozen", "frozen_slow"])
def test_a_zero_gate_is_dense_bit_for_bit(variant: str, dtype: torch.dtype, mesh: Mesh) -> None:
    dense = build_model(small_config(model={"variant": "dense"}), mesh, dtype)
    other = build_model(small_config(model={"variant": variant}), mesh, dtype)
    fast = dict(other.named_parameters())
    for name, p in dense.named_parameters():
        assert torch.equal(p, fast[name]), name
    tokens = tokens_of(small_config(), batch=3)
    assert torch.equal(dense.logits(tokens), other.logits(tokens))
    assert torch.equal(dense(tokens, tokens), other(tokens, tokens))


def test_at_step_zero_only_the_gates_of_the_slow_path_learn(mesh: Mesh) -> None:
    model = build_model(small_config(), mesh)
    tokens = tokens_of(small_config())
    model(tokens, tokens).backward()
    for name, p in model.exchanges.named_parameters():
        assert p.grad is not None
        if name.endswith("gate"):
            assert p.grad.abs().min() > 0, name
        else:
            assert p.grad.abs().max() == 0, name


def test_trainable_parameters_of_the_variants(mesh: Mesh) -> None:
    def trained(variant: str) -> set[str]:
        model = build_model(small_config(model={"variant": variant}), mesh)
        return {name for name, p in model.exchanges.named_parameters() if p.requires_grad}

    assert trained("dense") == trained("frozen") == set()
    assert trained("frozen_slow") == {"0.gate", "0.phi_down.weight", "1.gate", "1.phi_down.weight"}
    assert len(trained("coupled")) == len(dict(build_model(small_config(), mesh).exchanges.named_parameters()))


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_sequence_no_longer_than_a_block_is_dense(length: int, mesh: Mesh) -> None:
    dense = build_model(small_config(model={"variant": "dense"}), mesh)
    model = build_model(small_config(), mesh)
    open_gates(model)
    tokens = tokens_of(small_config(), length)
    assert torch.equal(model.logits(tokens), dense.logits(tokens))
    model(tokens, tokens).backward()


def test_dense_equals_hugging_face_llama(mesh: Mesh) -> None:
    transformers = pytest.importorskip("transformers")
    config = small_config(model={"variant": "dense", "vocab_size": 64, "rope_theta": 5000.0})
    model = build_model(config, mesh)
    m = config.model
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=m.hidden_size,
            intermediate_size=m.intermediate_size,
            num_hidden_layers=m.num_hidden_layers,
            num_attention_heads=m.num_attention_heads,
            num_key_value_heads=m.num_key_value_heads,
            rms_norm_eps=m.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta},
            rope_theta=m.rope_theta,
            tie_word_embeddings=False,
        )
    )
    state = {"lm_head.weight": model.lm_head.weight, "model.norm.weight": model.norm.weight}
    state["model.embed_tokens.weight"] = model.embed_tokens.weight
    for i, layer in enumerate(model.layers):
        name = f"model.layers.{i}"
        parts = reference.split_qkv(layer.self_attn.qkv_proj.weight, m.num_attention_heads, m.num_key_value_heads)
        for letter, part in zip("qkv", parts, strict=True):
            state[f"{name}.self_attn.{letter}_proj.weight"] = part
        state[f"{name}.self_attn.o_proj.weight"] = layer.self_attn.o_proj.weight
        gate, up = reference.split_gate_up(layer.mlp.gate_up_proj.weight, m.num_key_value_heads)
        state |= {f"{name}.mlp.gate_proj.weight": gate, f"{name}.mlp.up_proj.weight": up}
        state[f"{name}.mlp.down_proj.weight"] = layer.mlp.down_proj.weight
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{name}.{norm}.weight"] = getattr(layer, norm).weight
    llama.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=True)
    tokens = tokens_of(config)
    torch.testing.assert_close(model.logits(tokens), llama(tokens).logits, rtol=1e-5, atol=1e-5)


def test_initial_weights_have_the_widths_that_the_config_says(mesh: Mesh) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}
    config = small_config(model=wide, slow={"initializer_range": "fan_in", "num_layers": 2})
    model = build_model(config, mesh)
    depth = math.sqrt(2 * config.model.num_hidden_layers)
    slow_depth = math.sqrt(2 * config.slow.num_layers * len(config.slow.exchange_after))
    expected = {
        "embed_tokens.weight": 0.02,
        "lm_head.weight": 0.02,
        "layers.1.self_attn.qkv_proj.weight": 0.02,
        "layers.1.self_attn.o_proj.weight": 0.02 / depth,
        "layers.2.mlp.down_proj.weight": 0.02 / depth,
        "exchanges.1.pool_proj.weight": 128**-0.5,
        "exchanges.0.phi_down.weight": 256**-0.5,
        "exchanges.0.slow_layers.1.mlp.down_proj.weight": 256**-0.5 / slow_depth,
    }
    weights = dict(model.named_parameters())
    for name, std in expected.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.02), name
        assert weights[name].mean().abs().item() < std / 20, name
    assert all(torch.equal(e.gate, torch.zeros(128)) for e in model.exchanges)


def test_the_seed_and_nothing_else_decides_the_weights(mesh: Mesh) -> None:
    first = build_model(small_config(), mesh)
    torch.manual_seed(123)
    again = build_model(small_config(), mesh)
    other = build_model(small_config(train={"seed": 1}), mesh)
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name
    layers = dict(first.named_parameters())
    assert not torch.equal(layers["layers.0.mlp.down_proj.weight"], layers["layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(recompute: str, mesh: Mesh) -> None:
    plain, saving = build_model(small_config(), mesh), build_model(small_config(train={"recompute": recompute}), mesh)
    tokens = tokens_of(small_config())
    for model in (plain, saving):
        open_gates(model)
        model(tokens, tokens).backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


if torch.cuda.is_available():

    def test_the_slow_path_is_deterministic_on_a_gpu(mesh: Mesh) -> None:
        """Replicas stay bitwise equal only if the same input gives the same gradient each time."""
        config = small_config(train={"seq_length": 512}, slow={"num_layers": 2})
        gradients = []
        for _ in range(5):
            model = build_model(config, mesh).cuda()
            open_gates(model)
            tokens = tokens_of(config, batch=8).cuda()
            model(tokens, tokens).backward()
            gradients.append([p.grad for p in model.exchanges.parameters()])
        for again in gradients[1:]:
            assert all(torch.equal(a, b) for a, b in zip(gradients[0], again, strict=True))

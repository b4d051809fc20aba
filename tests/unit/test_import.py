"""A Llama of Hugging Face's as the start of a run, against transformers' own Llama."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from data_pipeline.errors import UserError
from data_pipeline.readers import Document
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.stream import TokenDataset
from data_pipeline.tokenizer import MODEL_NAME
from fastslow_scale import cli
from fastslow_scale.config_file import load_config
from fastslow_scale.inference.export import export
from fastslow_scale.inference.import_llama import import_llama
from fastslow_scale.inference.load import load_model
from fastslow_scale.launch import ending
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.checkpoint_reader import CheckpointReader
from fastslow_scale.train.engine import Engine
from fastslow_scale.train.init_from import load_weights
from tests.checkpoints import VOCABULARY, config_of, random_model, save_run, some_ids, tokenizer_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-4,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 3,
}


def llama(theta: float = 7000.0, **changes: Any) -> Any:
    torch.manual_seed(0)
    # The second is the older name.
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | rope | changes))).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += torch.randn(p.shape) / 4
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """A Hugging Face folder, with a tokenizer that fits."""
    model.save_pretrained(folder, **options)
    (folder / MODEL_NAME).write_bytes(tokenizer_of().model)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(llama(), tmp_path / "llama")


LLAMAS = {
    "grouped": {},
    "no grouping": {"num_key_value_heads": 4, "intermediate_size": 26},
    "tied": {"tie_word_embeddings": True},
    "one key-value head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("changes", LLAMAS.values(), ids=LLAMAS)
def test_logits_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = llama(**changes)
    import_llama(saved(model, tmp_path / "llama"), tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    assert loaded.config.model.variant == "dense"
    ids = some_ids(60)
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(loaded.model.logits(ids), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.3


def test_a_window_comes_along(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=5)).eval()
    import_llama(saved(model, tmp_path / "mistral"), tmp_path / "out")
    loaded = load_model(tmp_path / "out")
    assert loaded.config.model.attention_window == 5
    ids = some_ids(60)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model.logits(ids), model(ids).logits, rtol=1e-5, atol=1e-5)


def test_weights_in_parts_and_in_half_precision(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    import_llama(saved(model, tmp_path / "whole"), tmp_path / "one")
    folder = saved(model, tmp_path / "parts", max_shard_size="5KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    import_llama(folder, tmp_path / "two")
    one, two = (load_model(tmp_path / name).model for name in ("one", "two"))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.norm.weight, model.model.norm.weight.float())


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_window": 6}])
def test_what_was_exported_comes_back_bit_for_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(model={"variant": "dense"} | changes)
    model = random_model(config)
    checkpoint = save_run(tmp_path / "run", model, tokenizer_of(), tp_size=2)
    export(tmp_path / "run", tmp_path / "export")
    import_llama(tmp_path / "export", tmp_path / "out", ["model.vocab_multiple=64"])
    before, after = CheckpointReader(checkpoint), CheckpointReader(tmp_path / "out" / "checkpoints" / "step_00000000")
    assert before.names() == after.names()
    for name in before.names():
        rows = slice(VOCABULARY if name in ("embed_tokens.weight", "lm_head.weight") else None)
        assert torch.equal(before.full(name)[rows], after.full(name)[rows]), name
        assert before.shape(name) == after.shape(name)
    again = load_model(tmp_path / "out").config.model
    assert again.model_dump(exclude={"variant"}) == config.model.model_dump(exclude={"variant"})

    export(tmp_path / "out", tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_coupled_run_starts_from_it_as_the_same_function(source: Path, tmp_path: Path) -> None:
    """Through the engine, as `fastslow train DIR/config.yaml` does."""
    documents = (Document(f"grief hill {n} lamp\n" * 9, f"document {n}") for n in range(30))
    write_data_folder(tmp_path / "data", documents, tokenizer_of(), Layout(24))
    made = import_llama(source, tmp_path / "out", [f"data.path={tmp_path / 'data'}", "slow.pool_size=4"])
    assert made.notes == []
    config = load_config(made.path)
    assert config == made.config
    assert (config.model.variant, config.slow.pool_size, config.train.seq_length) == ("coupled", 4, 24)
    assert config.train.run_dir != tmp_path / "out"
    mesh = single_process_mesh()
    model = build_model(config, mesh)
    engine = Engine(model, config, mesh)
    told = load_weights(engine.deepspeed, mesh, config, TokenDataset.open(tmp_path / "data").tokenizer_sha256)
    assert str(tmp_path / "out" / "checkpoints" / "step_00000000") in told[-1]
    assert all(not exchange.gate.any() for exchange in model.exchanges)
    ids = some_ids(24)
    with torch.no_grad():
        dense = load_model(tmp_path / "out").model.logits(ids)
        assert torch.equal(model.logits(ids), dense)
        expected = transformers.LlamaForCausalLM.from_pretrained(source)(ids).logits
    torch.testing.assert_close(dense, expected, rtol=1e-5, atol=1e-5)


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(source: Path, *overrides: str) -> str:
    output = source.parent / "out"
    with pytest.raises(UserError) as raised:
        import_llama(source, output, overrides)
    assert "\n" not in str(raised.value)
    assert not output.exists()
    return str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("quantization_config", {"bits": 4}),
        ("model_type", "qwen2"),
        ("head_dim", 8),
        ("hidden_size", None),
    ],
)
def test_a_feature_that_the_fast_path_lacks_is_named(key: str, value: Any, source: Path) -> None:
    edit(source, **{key: value})
    assert f"{source / 'config.json'}: {key} " in refusal(source)


def test_scaled_rotary_positions_are_refused(source: Path) -> None:
    edit(source, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0})
    assert "rope_type is llama3" in refusal(source)


def test_weights_that_do_not_fit_are_named(source: Path) -> None:
    file = source / "model.safetensors"
    whole = load_file(file)

    def write(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, file, {"format": "pt"})

    bias = "model.layers.1.self_attn.q_proj.bias"
    write(whole | {bias: torch.zeros(16)})
    assert refusal(source) == f"{source} has {bias}, which the fast path does not have"
    lost = "model.layers.2.mlp.up_proj.weight"
    write({name: tensor for name, tensor in whole.items() if name != lost})
    assert refusal(source) == f"{source} lacks {lost}"
    for name, shape in ((lost, (23, 16)), ("model.norm.weight", (15,)), ("lm_head.weight", (361, 16))):
        write(whole | {name: torch.zeros(shape)})
        assert f"{name} is {shape}" in refusal(source)
    write(whole)
    file.write_bytes(file.read_bytes()[:-1])
    assert refusal(source).startswith(f"{file}: ")
    file.rename(source / "pytorch_model.bin")
    assert refusal(source) == f"{file} does not exist; weights are read from safetensors only"


def test_an_index_cannot_lead_out_of_the_folder(source: Path) -> None:
    outside = (source / "model.safetensors").rename(source.parent / "model.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(outside), "../model.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors does not exist" in refusal(source)


def test_the_tokenizer_must_be_known_and_fit(source: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone") == f"{tmp_path / 'gone' / 'config.json'} does not exist"
    (source / MODEL_NAME).write_bytes(tokenizer_of(370).model)
    assert f"has 370 pieces, but {source} has a vocabulary of {VOCABULARY}" in refusal(source)
    (source / MODEL_NAME).unlink()
    assert "give data.path=DIR" in refusal(source)
    documents = (Document(f"grief hill {n}\n" * 9, f"document {n}") for n in range(30))
    write_data_folder(tmp_path / "data", documents, tokenizer_of(), Layout(24))
    made = import_llama(source, tmp_path / "out", [f"data.path={tmp_path / 'data'}"])
    assert "is not known to be that of" in made.notes[0]
    assert load_model(tmp_path / "out").tokenizer.sha256 == tokenizer_of().sha256


def test_what_follows_from_the_weights_cannot_be_given(source: Path) -> None:
    assert "model.rope_theta follows from the weights" in refusal(source, "model.rope_theta=1")
    assert "slow.pool_sizes is not a known key" in refusal(source, "slow.pool_sizes=4")
    assert "slow.exchange_after must name layers" in refusal(source, "slow.exchange_after=[4]")


def test_the_command(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = source.parent / "out"
    monkeypatch.setattr(ending, "first_to_report", lambda: True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for status in (0, 2):
        monkeypatch.setattr(
            sys, "argv", ["fastslow", "import", str(source), "--output", str(output), "train.max_steps=7"]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert int(ended.value.code or 0) == status
        told = capsys.readouterr()
        if status == 0:
            assert told.out.endswith(f"fastslow train {output / 'config.yaml'} data.path=DATA\n")
        else:
            assert told.err.count("\n") == 1 and f"--output {output} exists already" in told.err
    tree = yaml.safe_load((output / "config.yaml").read_text())
    assert tree["train"]["max_steps"] == 7
    assert tree["train"]["init_from"] == str(output)

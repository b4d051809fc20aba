"""An exported folder, loaded by transformers, against the trainer's own forward, decoder and tokenizer."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.errors import UserError
from fastslow_scale import cli
from fastslow_scale.config import Config
from fastslow_scale.inference.evaluation_data import rows_of_run
from fastslow_scale.inference.export import export
from fastslow_scale.inference.generate import Sampling, generate_ids
from fastslow_scale.inference.load import load_model
from fastslow_scale.launch import ending
from fastslow_scale.model.model import FastSlowModel
from fastslow_scale.train.checkpoint_files import _encode, read_manifest
from tests.checkpoints import CONTEXT, VOCABULARY, WORDS, config_of, random_model, save_run, some_ids, tokenizer_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", autouse=True)
def code_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers copies the code of a folder before it runs it: not into the user's home."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        yield


def exported(config: Config, folder: Path, tp_size: int = 1, scale: float = 0.8) -> tuple[FastSlowModel, Path]:
    """A random model of that config, and the folder of its export."""
    model = random_model(config, scale=scale)
    save_run(folder / "run", model, tokenizer_of(), tp_size=tp_size)
    export(folder / "run", folder / "export")
    return model, folder / "export"


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


DENSE = {"variant": "dense"}
SHAPES = {
    "dense": (config_of(model=DENSE), "LlamaForCausalLM"),
    "dense, tied": (config_of(model=DENSE | {"tie_word_embeddings": True}), "LlamaForCausalLM"),
    "dense, one key-value head": (config_of(model=DENSE | {"num_key_value_heads": 1}), "LlamaForCausalLM"),
    "dense, no common group": (
        config_of(model=DENSE | {"num_key_value_heads": 4, "intermediate_size": 26}),
        "LlamaForCausalLM",
    ),
    "dense, window": (config_of(model=DENSE | {"attention_window": 5}), "MistralForCausalLM"),
    "coupled": (config_of(), "FastSlowForCausalLM"),
    "coupled, window": (config_of(model={"attention_window": 5}), "FastSlowForCausalLM"),
    "coupled, window of one": (config_of(model={"attention_window": 1}), "FastSlowForCausalLM"),
    "coupled, tied": (config_of(model={"tie_word_embeddings": True}), "FastSlowForCausalLM"),
    "one exchange at the end": (config_of(slow={"exchange_after": [3], "pool_size": 7}), "FastSlowForCausalLM"),
    "another slow path": (
        config_of(
            slow={
                "exchange_after": [1, 2, 3],
                "pool_size": 3,
                "num_layers": 2,
                "hidden_size": 8,
                "intermediate_size": 10,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "phi_intermediate_size": 12,
            }
        ),
        "FastSlowForCausalLM",
    ),
    "no slow layers": (config_of(slow={"num_layers": 0}), "FastSlowForCausalLM"),
    "frozen": (config_of(model={"variant": "frozen"}), "FastSlowForCausalLM"),
    "frozen_slow": (config_of(model={"variant": "frozen_slow"}), "FastSlowForCausalLM"),
}


@pytest.mark.parametrize(("config", "architecture"), SHAPES.values(), ids=SHAPES)
def test_logits_are_the_trainers(config: Config, architecture: str, tmp_path: Path) -> None:
    model, folder = exported(config, tmp_path)
    other = loaded(folder)
    assert type(other).__name__ == architecture
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCABULARY
    with torch.no_grad():
        for length in (1, config.slow.pool_size, 50):
            ids = some_ids(length)
            torch.testing.assert_close(other(ids).logits, model.logits(ids), rtol=1e-5, atol=1e-5)
    # What a wrong scale or a closed gate would hide.
    assert model.logits(some_ids(50)).std() > 0.5


@pytest.mark.parametrize("variant", ["dense", "coupled"])
def test_logits_at_the_end_of_the_context_are_the_trainers(variant: str, tmp_path: Path) -> None:
    model, folder = exported(config_of(model={"variant": variant}), tmp_path, tp_size=2)
    ids = some_ids(CONTEXT)
    with torch.no_grad():
        torch.testing.assert_close(loaded(folder)(ids).logits, model.logits(ids), rtol=1e-5, atol=1e-5)


GENERATING = {
    "dense": config_of(model=DENSE),
    "dense, window": config_of(model=DENSE | {"attention_window": 5}),
    "coupled": config_of(),
    "coupled, window": config_of(model={"attention_window": 5}),
    "another slow path": SHAPES["another slow path"][0],
}


@pytest.mark.parametrize("config", GENERATING.values(), ids=GENERATING)
def test_greedy_generation_is_ours(config: Config, tmp_path: Path) -> None:
    model, folder = exported(config, tmp_path, scale=1.5)
    other = loaded(folder)
    other.generation_config.eos_token_id = None
    prompt = some_ids(9, batch=1)
    expected = [row[0] for row in generate_ids(model, prompt.tolist(), 200, -1, GREEDY)]
    assert len(set(expected)) > 20, "a constant text would hide mistakes"
    made = other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)
    assert made[0, 9:].tolist() == expected


def test_generation_ends_with_the_document(tmp_path: Path) -> None:
    model, folder = exported(config_of(), tmp_path)
    tokenizer = tokenizer_of()
    prompt = some_ids(9, batch=1)
    with torch.no_grad():
        sixth = [row[0] for row in generate_ids(model, prompt.tolist(), 7, -1, GREEDY)]
        other = loaded(folder)
        other.lm_head.weight[tokenizer.eos_id] = other.lm_head.weight[sixth[5]] * 1.01
    made = other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False)
    assert made[0, -1] == tokenizer.eos_id
    assert made.shape[1] <= 9 + 6
    assert other.generation_config.pad_token_id == tokenizer.pad_id


PROMPTS = (3, 11, 1, 8)


def padded(prompts: list[list[int]], side: str = "left", pad_id: int = 3) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        padding = longest - len(prompt)
        left = side == "left"
        rows.append([pad_id] * padding * left + prompt + [pad_id] * padding * (not left))
        masks.append([0] * padding * left + [1] * len(prompt) + [0] * padding * (not left))
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("variant", ["dense", "coupled"])
def test_prompts_of_unequal_length_go_on_as_each_alone(variant: str, window: int | None, tmp_path: Path) -> None:
    """Blocks count from each row's first token that is not padding."""
    model, folder = exported(config_of(model={"variant": variant, "attention_window": window}), tmp_path, scale=1.5)
    other = loaded(folder)
    other.generation_config.eos_token_id = None
    prompts = [some_ids(length, batch=1, seed=length)[0].tolist() for length in PROMPTS]
    made = other.generate(**padded(prompts), max_new_tokens=25, do_sample=False)[:, max(PROMPTS) :]
    for row, prompt in enumerate(prompts):
        expected = [step[0] for step in generate_ids(model, [prompt], 25, -1, GREEDY)]
        assert made[row].tolist() == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_logit(side: str, tmp_path: Path) -> None:
    model, folder = exported(config_of(), tmp_path)
    other = loaded(folder)
    prompts = [some_ids(length, batch=1, seed=length)[0].tolist() for length in (5, 23, 1)]
    inputs = padded(prompts, side)
    with torch.no_grad():
        logits = other(**inputs).logits
        for row, prompt in enumerate(prompts):
            own = logits[row][inputs["attention_mask"][row].bool()]
            torch.testing.assert_close(own, model.logits(torch.tensor([prompt]))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [[1] * 30, [4, 1, 9, 2, 14], [29, 1], [8, 8, 14]])
def test_a_text_taken_in_by_parts_is_the_whole(cuts: list[int], tmp_path: Path) -> None:
    """Rows whose blocks end at different tokens, through the cache, in parts of any length."""
    model, folder = exported(config_of(), tmp_path)
    other = loaded(folder)
    prompts = [some_ids(length, batch=1, seed=length)[0].tolist() for length in (30, 27, 13)]
    inputs = padded(prompts)
    cache, parts, start = None, [], 0
    with torch.no_grad():
        for count in cuts:
            stop = start + count
            out = other(inputs["input_ids"][:, start:stop], inputs["attention_mask"][:, :stop], past_key_values=cache)
            cache, start = out["cache"] if "cache" in out else out["past_key_values"], stop
            parts.append(out.logits)
        logits = torch.cat(parts, 1)
        for row, prompt in enumerate(prompts):
            torch.testing.assert_close(
                logits[row, -len(prompt) :], model.logits(torch.tensor([prompt]))[0], rtol=1e-5, atol=1e-5
            )


def test_the_slow_path_runs_once_per_block(tmp_path: Path) -> None:
    config = config_of()
    _, folder = exported(config, tmp_path)
    other = loaded(folder)
    other.generation_config.eos_token_id = None
    blocks: list[int] = []
    exchange = other.model.exchanges[1]
    exchange.pool_proj.register_forward_hook(lambda module, args, out: blocks.append(out.shape[1]))
    prompt = some_ids(9, batch=1)
    other.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    # 9 tokens hold two blocks of 4; of the 24 that follow all but the last are taken in, and end blocks 3 to 8.
    assert blocks == [2, 1, 1, 1, 1, 1, 1]


def test_beams_carry_their_slow_states_along(tmp_path: Path) -> None:
    _, folder = exported(config_of(), tmp_path)
    other = loaded(folder)
    other.generation_config.eos_token_id = None
    inputs = padded([some_ids(n, batch=1, seed=n)[0].tolist() for n in (5, 9)])
    made = [
        other.generate(**inputs, max_new_tokens=20, num_beams=3, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*made)


def test_a_draft_that_would_have_to_be_taken_back_is_refused(tmp_path: Path) -> None:
    _, folder = exported(config_of(), tmp_path)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        loaded(folder).generate(some_ids(9, batch=1), max_new_tokens=5, prompt_lookup_num_tokens=2)


def test_training_goes_on_in_transformers(tmp_path: Path) -> None:
    """Loss and gradients are those of the trainer, and what is saved again loads again."""
    model, folder = exported(config_of(), tmp_path)
    other = loaded(folder).train()
    ids = some_ids(30)
    loss = other(ids, labels=ids).loss
    loss.backward()
    own = model(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()
    own.backward()
    torch.testing.assert_close(loss, own, rtol=1e-5, atol=1e-5)
    theirs = dict(other.named_parameters())
    for name, p in model.named_parameters():
        if not name.endswith(("qkv_proj.weight", "gate_up_proj.weight")):
            grad = theirs[name if name == "lm_head.weight" else f"model.{name}"].grad
            torch.testing.assert_close(grad, p.grad[: grad.shape[0]], rtol=1e-4, atol=1e-6, msg=name)

    with torch.no_grad():
        other.model.exchanges[0].gate += 1
    other.eval().save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "again")(ids).logits, other(ids).logits)


def test_a_new_model_of_this_kind_has_closed_gates(tmp_path: Path) -> None:
    _, folder = exported(config_of(), tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    new = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert all(not exchange.gate.any() for exchange in new.model.exchanges)


def test_a_wrong_mask_or_a_foreign_cache_is_refused(tmp_path: Path) -> None:
    _, folder = exported(config_of(), tmp_path)
    other = loaded(folder)
    ids = some_ids(5)
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 5\), not \(2, 4\)"):
        other(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="must be a FastSlowCache"):
        other(ids, past_key_values=transformers.DynamicCache())


def test_the_folder_needs_nothing_of_this_project(tmp_path: Path) -> None:
    """In another process that cannot import it."""
    model, folder = exported(config_of(), tmp_path)
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fastslow_scale", "data_pipeline", "megatron"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
ids = tokenizer("grief hill lamp moss", return_tensors="pt").input_ids
print(model(ids).logits[0, -1].argmax().item())
"""
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ids = torch.tensor([tokenizer_of().encode("grief hill lamp moss")])
    assert int(done.stdout.split()[-1]) == model.logits(ids)[0, -1].argmax().item()


def hf_tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a dense model."""
    return exported(config_of(model=DENSE), tmp_path_factory.mktemp("dense"))[1]


def nasty_texts() -> list[str]:
    """Characters of every kind, and what breaks tokenizers: marks that are only text, long lines, long texts."""
    blocks = [
        "".join(chr(code) for code in range(start, start + 4096) if not 0xD800 <= code <= 0xDFFF)
        for start in [*range(0, 0x18000, 4096), 0x1F000, 0xE0000, 0x10F000]
    ]
    long = ["x" * 140_000, "one two " * 20_000 + "\n" + "three\n" * 5_000]
    long += ["a" * 16_383 + "\n" + "b" * 70_000 + " c" * 9]
    marks = ["<s></s><unk><pad><0x41>\u2585 \u2047 ", "</s>", "<s>", " <pad> ", "\u2581</s>\u2581"]
    marks += ["\u2581", "\u2581a\u2581\u2581 b\u2581"]
    ends = ["a\r\nb\rc\n\n\nd\n", "\tx\n\t\ty  \n   z   ", " ", "  ", "\n", "\n\n", "nul\0in\0", "\0", "\ufeffmark", ""]
    emoji = [
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
        "e\u0301 \u00e9 \ufb01",
        "中文ab",
    ]
    rng = random.Random(2)
    mixed = ["".join(rng.choices([*WORDS, " ", "\n", "\u2581", "</s>", "\0", "aa"], k=40)) for _ in range(200)]
    return [*filter(None, blocks), *long, *marks, *ends, *emoji, *mixed]


def test_the_tokenizer_gives_the_same_ids_for_every_text(folder: Path) -> None:
    ours, theirs = tokenizer_of(), hf_tokenizer(folder)
    for text in nasty_texts():
        expected = ours.encode(text)
        assert theirs(text).input_ids == expected, repr(text[:50])
        assert theirs.decode(expected) == text, repr(text[:50])
    assert theirs.convert_tokens_to_ids(theirs.tokenize("grief 中文\n")) == ours.encode("grief 中文\n")
    with pytest.raises((ValueError, RuntimeError, UnicodeEncodeError)):
        theirs("x\ud800y")


def test_the_tokenizers_marks(folder: Path) -> None:
    ours, theirs = tokenizer_of(), hf_tokenizer(folder)
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id) == (ours.eos_id, ours.pad_id, None)
    assert len(theirs) == theirs.vocab_size == ours.vocab_size == VOCABULARY
    ids = [*ours.encode("moss"), ours.eos_id, *ours.encode(" vale"), ours.pad_id]
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == "moss vale"
    assert theirs.decode(ids) == "moss</s> vale<pad>"
    batch = theirs(["moss", "grief hill lamp"], padding=True, padding_side="left", return_tensors="pt")
    short = ours.encode("moss")
    assert batch.input_ids[0].tolist()[-len(short) :] == short
    assert batch.input_ids[0, 0] == ours.pad_id and batch.attention_mask[0, 0] == 0
    with pytest.raises(ValueError, match="cannot be added"):
        theirs.add_tokens(["<new>"])


def test_the_tokenizer_saves_itself(folder: Path, tmp_path: Path) -> None:
    hf_tokenizer(folder).save_pretrained(tmp_path / "again")
    for text in ["</s>\u2581 x\n", *nasty_texts()[-20:]]:
        assert hf_tokenizer(tmp_path / "again")(text).input_ids == tokenizer_of().encode(text)


@pytest.mark.parametrize("window", [None, 5])
def test_without_leave_to_run_its_code_no_other_tokenizer_takes_its_place(window: int | None, tmp_path: Path) -> None:
    _, folder = exported(config_of(model=DENSE | {"attention_window": window}), tmp_path)
    with pytest.raises(ValueError, match=r"trust_remote_code=True|instantiate the backend tokenizer"):
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def test_the_newest_sound_checkpoint_or_the_named_one(tmp_path: Path) -> None:
    config = config_of(model=DENSE)
    old, new = random_model(config, seed=1), random_model(config, seed=2)
    first = save_run(tmp_path / "run", old, tokenizer_of(), step=3)
    second = save_run(tmp_path / "run", new, tokenizer_of(), step=7, tp_size=2)
    ids = some_ids(9)
    for source, model, output in ((tmp_path / "run", new, "newest"), (first, old, "named")):
        assert export(source, tmp_path / output).notes == []
        with torch.no_grad():
            logits = loaded(tmp_path / output)(ids).logits
        torch.testing.assert_close(logits, model.logits(ids), rtol=1e-5, atol=1e-5)
    weights = next(second.glob("tp1*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert str(weights) in export(tmp_path / "run", tmp_path / "older").notes[0]
    assert json.loads((tmp_path / "older" / "config.json").read_text()) == json.loads(
        (tmp_path / "named" / "config.json").read_text()
    )


def test_the_card_tells_the_run(tmp_path: Path) -> None:
    config = config_of()
    model = random_model(config)
    save_run(tmp_path / "run", model, tokenizer_of(), step=40)
    lines = [(20, 3.5), (40, 3.25), (60, 3.0)]
    text = "".join(json.dumps({"step": step, "validation_loss": loss}) + "\n" for step, loss in lines)
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    written = export(tmp_path / "run", tmp_path / "export")
    other = loaded(tmp_path / "export")
    assert written.parameters == sum(p.numel() for p in other.parameters())
    card = (tmp_path / "export" / "README.md").read_text()
    assert "| validation loss | 3.2500 nats per token, at step 40 |" in card
    assert f"| parameters | {written.parameters:,} |" in card
    assert f"| trained on | {40 * 8 * CONTEXT:,} tokens (40 steps) |" in card
    assert "| variant | `coupled`:" in card


def refusal(source: Path, output: Path) -> str:
    with pytest.raises(UserError) as raised:
        export(source, output)
    assert "\n" not in str(raised.value)
    assert not output.exists() or output.name == "full"
    return str(raised.value)


def test_what_cannot_be_exported_is_said_in_a_line(tmp_path: Path) -> None:
    output = tmp_path / "export"
    assert refusal(tmp_path / "gone", output) == f"run {tmp_path / 'gone'} does not exist"
    save_run(tmp_path / "shuffled", random_model(config_of(model={"variant": "shuffled"})), tokenizer_of())
    assert "variant shuffled" in refusal(tmp_path / "shuffled", output)
    save_run(tmp_path / "one", random_model(config_of(model=DENSE | {"attention_window": 1})), tokenizer_of())
    assert "model.attention_window 1" in refusal(tmp_path / "one", output)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    assert refusal(tmp_path / "one", full).startswith(f"--output {full} exists already")
    assert [path.name for path in full.iterdir()] == ["file"]

    coupled, dense = config_of(), config_of(model=DENSE)
    checkpoint = save_run(tmp_path / "run", random_model(coupled), tokenizer_of())
    manifest = read_manifest(checkpoint)
    manifest["state"]["config"] = dense.model_dump(mode="json")
    (checkpoint / "manifest.json").write_text(_encode(manifest))
    assert "holds other parameters than its config describes" in refusal(tmp_path / "run", output)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    # A job reports a mistake once; here all the commands are one job.
    monkeypatch.setattr(ending, "first_to_report", lambda: True)
    monkeypatch.setattr(sys, "argv", ["fastslow", "export", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_run(tmp_path / "run", random_model(config_of(model=DENSE)), tokenizer_of())
    monkeypatch.setitem(sys.modules, "transformers", None)  # an export does not need it
    assert run_command(monkeypatch, str(tmp_path / "run"), "--output", str(tmp_path / "out")) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{tmp_path / 'out'}: LlamaForCausalLM, ") and str(checkpoint) in told
    assert run_command(monkeypatch, str(tmp_path / "run"), "--output", str(tmp_path / "out")) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("shape", ["dense", "dense, window", "dense, tied", "coupled, window", "another slow path"])
def test_an_export_is_loaded_here_as_the_same_model(shape: str, tmp_path: Path) -> None:
    model, folder = exported(SHAPES[shape][0], tmp_path)
    again = load_model(folder)
    ids = some_ids(60)
    with torch.no_grad():
        assert torch.equal(again.model.logits(ids), model.logits(ids))
    assert again.tokenizer.model == tokenizer_of().model
    assert (again.config.train.seq_length, again.config.model.variant) == (
        CONTEXT,
        shape.split(",")[0].replace("another slow path", "coupled"),
    )


def test_an_export_knows_that_documents_were_kept_apart(tmp_path: Path) -> None:
    config = SHAPES["dense"][0]
    for apart in (True, False):
        data = config.data.model_copy(update={"reset_at_document": apart})
        _, folder = exported(config.model_copy(update={"data": data}), tmp_path / str(apart))
        assert load_model(folder).config.data.reset_at_document == apart


def test_what_is_no_whole_export_is_said_in_a_line(tmp_path: Path) -> None:
    _, folder = exported(SHAPES["coupled"][0], tmp_path)
    described = json.loads((folder / "config.json").read_text())
    for change, words in (
        ({"num_hidden_layers": 4}, r"lacks 'model\.layers\.3\."),
        ({"hidden_size": 32}, "config.json says"),
        ({"num_attention_heads": 3}, "is damaged"),
    ):
        (folder / "config.json").write_text(json.dumps(described | change))
        with pytest.raises(UserError, match=words):
            load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(described))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(UserError, match="cannot be read"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(UserError, match="is an export, which does not say what it was trained on"):
        rows_of_run(load_model(folder), None)

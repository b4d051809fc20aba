"""From a checkpoint to text: what is loaded, how text streams, and what is refused in one line."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from data_pipeline.errors import UserError
from data_pipeline.readers import Document
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.stream import TokenDataset
from data_pipeline.tokenizer import MODEL_NAME, Tokenizer, train_tokenizer
from fastslow_scale import cli
from fastslow_scale.config import Config
from fastslow_scale.inference.generate import Sampling, TextStream, generate, generate_ids
from fastslow_scale.inference.load import load_model
from fastslow_scale.launch import ending
from fastslow_scale.model.model import build_model
from fastslow_scale.parallel.mesh import single_process_mesh
from fastslow_scale.train.checkpoint import save_checkpoint
from fastslow_scale.train.engine import Engine
from fastslow_scale.train.run_folder import keep_tokenizer
from tests.configs import small_config

pytestmark = pytest.mark.unit

SEQ_LENGTH = 40
GREEDY = Sampling(temperature=0)
WORDS = "grief hill lamp moss über naïve 中文 river stone \U0001f600 thorn under vale".split()


@dataclass(frozen=True)
class Trained:
    """A run folder with one checkpoint, of gates that are open."""

    folder: Path
    checkpoint: Path
    data: Path
    config: Config
    weights: dict[str, torch.Tensor]


def some_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{n} " + " ".join(rng.choices(WORDS, k=30)) + "\n" for n in range(count)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    base = tmp_path_factory.mktemp("trained")
    tokenizer, _ = train_tokenizer(some_texts(200), 360)
    documents = (Document(text, f"document {n}") for n, text in enumerate(some_texts(40)))
    write_data_folder(base / "data", documents, tokenizer, Layout(SEQ_LENGTH))
    config = small_config(
        model={"vocab_size": tokenizer.vocab_size},
        data={"path": base / "data"},
        train={"seq_length": SEQ_LENGTH, "run_dir": base / "run"},
    )
    data = TokenDataset.open(base / "data")
    # What a run on two tensor-parallel ranks writes into its checkpoint.
    saved = config.model_dump(mode="json")
    saved["parallel"] |= {"tensor_parallel_size": 2, "sequence_parallel": True}

    mesh = single_process_mesh()
    model = build_model(config, mesh)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate"):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
            elif p.ndim == 2:
                p.mul_(10)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = Engine(model, config, mesh)
    folder = base / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(config.to_yaml())
    state = {"step": 5, "config": saved, "data_fingerprint": data.fingerprint}
    checkpoint = save_checkpoint(engine.deepspeed, mesh, folder / "checkpoints", 5, state, keep=1)
    return Trained(folder, checkpoint, base / "data", config, weights)


@pytest.fixture
def own(trained: Trained, tmp_path: Path) -> Path:
    """A copy of the run folder that a test may change."""
    return Path(shutil.copytree(trained.folder, tmp_path / "run"))


def test_a_run_and_its_checkpoint_give_the_saved_weights_on_one_process(trained: Trained) -> None:
    for source in (trained.folder, str(trained.checkpoint)):
        loaded = load_model(source)
        assert loaded.checkpoint == trained.checkpoint
        assert loaded.notes == []
        parallel = loaded.config.parallel
        assert (parallel.tensor_parallel_size, parallel.sequence_parallel) == (1, False)
        parameters = dict(loaded.model.named_parameters())
        assert parameters.keys() == trained.weights.keys()
        for name, weight in trained.weights.items():
            assert torch.equal(parameters[name].cpu(), weight), name


def test_the_text_is_that_of_the_tokens(trained: Trained) -> None:
    loaded = load_model(trained.folder)
    tokenizer = loaded.tokenizer
    prompts = ["grief 中文", "u", ""]
    for sampling in (GREEDY, Sampling(temperature=2.0, top_p=1.0, seed=1)):
        rows = ["".join(pieces) for pieces in zip(*generate(loaded, prompts, 20, sampling), strict=True)]
        ids = [tokenizer.encode(prompts[0]), tokenizer.encode(prompts[1]), [tokenizer.eos_id]]
        steps = list(generate_ids(loaded.model, ids, 20, tokenizer.eos_id, sampling))
        for row, text in enumerate(rows):
            assert text == tokenizer.decode([step[row] for step in steps if step[row] is not None])
    assert any(rows)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.add(token) for token in ids), stream.finish()]


def byte_ids(tokenizer: Tokenizer) -> range:
    """The tokens that stand for the bytes 0 to 255; the encoder spells the word mark in them."""
    first = tokenizer.encode("\u2581")[0] - "\u2581".encode()[0]
    return range(first, first + 256)


@pytest.mark.parametrize(
    "text", ["plain words", "naïve 中文\U0001f600\U0001f469\u200d\U0001f467 é\n\n\t", "\u2581a\u2581"]
)
def test_a_stream_never_breaks_a_character(text: str, trained: Trained) -> None:
    tokenizer = Tokenizer.load(trained.data)
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


def test_a_stream_of_any_tokens_is_the_text_of_them_all(trained: Trained) -> None:
    tokenizer = Tokenizer.load(trained.data)
    rng = random.Random(1)
    for _ in range(300):
        whole, broken = tokenizer.encode("中\U0001f600\ufffd x\u2581"), list(byte_ids(tokenizer))
        ids = rng.choices(rng.choice([whole, broken, range(tokenizer.vocab_size)]), k=rng.randint(0, 25))
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_broken_bytes_are_held_back_no_longer_than_they_can_become_a_character(trained: Trained) -> None:
    tokenizer = Tokenizer.load(trained.data)
    smile = [byte_ids(tokenizer)[byte] for byte in "\U0001f600".encode()]
    assert streamed(tokenizer, smile) == ["", "", "", "\U0001f600", ""]
    stray = smile[1]
    assert streamed(tokenizer, [stray] * 5) == ["", "", "", "\ufffd", "\ufffd", "\ufffd" * 3]
    assert streamed(tokenizer, [stray, *smile]) == ["", "", "", "\ufffd", "\U0001f600", ""]


def test_the_context_is_used_to_its_end_and_not_beyond(trained: Trained) -> None:
    loaded = load_model(trained.folder)
    prompt = "grief"
    room = SEQ_LENGTH - len(loaded.tokenizer.encode(prompt))
    list(generate(loaded, [prompt], room, GREEDY))
    with pytest.raises(UserError, match=rf"--max-tokens {room + 1} exceed .*train.seq_length = 40.* at most {room}$"):
        list(generate(loaded, [prompt], room + 1, GREEDY))
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens; the trained context \(train.seq_length\) is 40$"):
        list(generate(loaded, [prompt, "x" * 400], 1, GREEDY))


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as raised:
        load_model(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_is_no_run_is_named(trained: Trained, tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone") == f"run {tmp_path / 'gone'} does not exist"
    file = tmp_path / "file"
    file.touch()
    assert refusal(file) == f"{file} is a file, not a run folder"
    assert refusal(trained.data) == f"{trained.data} is neither a run folder nor a checkpoint"
    young = tmp_path / "young"
    young.mkdir()
    (young / "config.yaml").write_text(trained.config.to_yaml())
    assert refusal(young) == f"run {young} has no checkpoint yet"
    (young / "checkpoints" / "step_00000001.saving").mkdir(parents=True)
    assert refusal(young) == f"run {young} has no checkpoint yet"
    empty = young / "checkpoints" / "step_00000001"
    empty.mkdir()
    assert str(empty / "manifest.json") in refusal(empty)


def test_a_damaged_checkpoint_is_passed_over_and_said_or_refused(own: Path) -> None:
    sound = own / "checkpoints" / "step_00000005"
    damaged = Path(shutil.copytree(sound, own / "checkpoints" / "step_00000006"))
    weights = next(damaged.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    loaded = load_model(own)
    assert loaded.checkpoint == sound
    assert len(loaded.notes) == 1 and str(weights) in loaded.notes[0]
    assert str(weights) in refusal(damaged)
    shutil.rmtree(sound)
    assert str(weights) in refusal(own)


def test_a_run_that_kept_its_tokenizer_needs_no_data(trained: Trained, own: Path, tmp_path: Path) -> None:
    hidden = trained.data.rename(trained.data.with_name("hidden"))
    try:
        assert (
            refusal(own) == f"{own / MODEL_NAME} is missing, and data.path = {trained.data} has no {MODEL_NAME} either"
        )
        keep_tokenizer(own, TokenDataset.open(hidden))
        assert load_model(own).tokenizer.sha256 == Tokenizer.load(hidden).sha256
    finally:
        hidden.rename(trained.data)


def test_a_tokenizer_that_does_not_fit_is_refused(trained: Trained, own: Path) -> None:
    other = train_tokenizer(some_texts(200), 370)[0]
    (own / MODEL_NAME).write_bytes(other.model)
    assert "has 370 pieces but" in refusal(own)
    (own / MODEL_NAME).unlink()

    same_size = train_tokenizer(some_texts(200, seed=9), 360)[0]
    original = (trained.data / MODEL_NAME).read_bytes()
    manifest = (trained.data / "manifest.json").read_text()
    try:
        (trained.data / MODEL_NAME).write_bytes(same_size.model)
        assert refusal(own).startswith(f"{trained.data / MODEL_NAME} is damaged: its sha256 differs")
        with pytest.raises(UserError, match="is not the tokenizer that encoded"):
            keep_tokenizer(own, TokenDataset.open(trained.data))
        assert not (own / MODEL_NAME).exists()

        documents = (Document(text, f"document {n}") for n, text in enumerate(some_texts(40)))
        write_data_folder(own / "data", documents, same_size, Layout(SEQ_LENGTH))
        for name in (MODEL_NAME, "manifest.json"):
            shutil.copy(own / "data" / name, trained.data / name)
        assert "was trained on other data than" in refusal(own)
    finally:
        (trained.data / MODEL_NAME).write_bytes(original)
        (trained.data / "manifest.json").write_text(manifest)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    # A job reports a mistake once; here all the commands are one job.
    monkeypatch.setattr(ending, "first_to_report", lambda: True)
    monkeypatch.setattr(sys, "argv", ["fastslow", "generate", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_prints_the_prompt_and_what_follows(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained.folder)
    loaded = load_model(run)

    def expected(prompt: str, seed: int) -> str:
        steps = generate(loaded, [prompt], 9, Sampling(temperature=0.7, top_p=0.9, seed=seed))
        return prompt + "".join(piece for (piece,) in steps)

    options = ["--max-tokens", "9", "--temperature", "0.7", "--top-p", "0.9", "--seed", "4"]
    assert run_command(monkeypatch, run, "--prompt", "moss", *options) == 0
    assert capsys.readouterr().out == expected("moss", 4) + "\n"
    assert run_command(monkeypatch, run, "--prompt", "moss", "--prompt", "", *options) == 0
    assert capsys.readouterr().out == expected("moss", 4) + "\n\n" + expected("", 5) + "\n"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--prompt", "x" * 400], "train.seq_length"),
        (["--prompt", "a", "--max-tokens", "40"], "ask for at most 39"),
        (["--prompt", "a\udc80"], "lone surrogate"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    complaint: str,
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(monkeypatch, str(trained.folder), *arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ") and complaint in told.err and told.err.count("\n") == 1


def test_a_config_of_another_version_is_refused(own: Path) -> None:
    from fastslow_scale.train.checkpoint_files import _encode, read_manifest

    checkpoint = own / "checkpoints" / "step_00000005"
    manifest = json.loads(json.dumps(read_manifest(checkpoint)))
    manifest["state"]["config"]["model"]["unheard_of"] = 1
    (checkpoint / "manifest.json").write_text(_encode(manifest))
    assert refusal(own) == f"{checkpoint} has no config that this version understands"

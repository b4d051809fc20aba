"""From a checkpoint to text: what is loaded, how text streams, and what is refused in one line."""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.errors import UserError
from data_pipeline.readers import Document
from data_pipeline.shards import Layout, write_data_folder
from data_pipeline.stream import TokenDataset
from data_pipeline.tokenizer import MODEL_NAME, Tokenizer, train_tokenizer
from fastslow_scale import cli
from fastslow_scale.config import Config
from fastslow_scale.inference.generate import Sampling, Stats, TextStream, generate, generate_ids
from fastslow_scale.inference.load import load_model
from fastslow_scale.inference.loaded import Loaded
from fastslow_scale.inference.stop import StopFilter
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
        # A key that not every ZeRO stage allows.
        optimizer={"clip_slow_apart": True},
        parallel={"zero_stage": 0},
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
        assert loaded.config.optimizer.clip_slow_apart
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


def filtered(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    until_stop = StopFilter(stops)
    return [*(until_stop.add(piece) for piece in pieces), until_stop.finish()], until_stop.stopped


def test_what_may_begin_a_stop_string_waits_and_nothing_else_does() -> None:
    assert filtered(["stop"], ["a s", "to", "ne st", "op!", "more"]) == (["a ", "", "stone ", "", "", ""], True)
    assert filtered(["stop"], ["a sto"]) == (["a ", "sto"], False)
    assert filtered(["aab"], ["aa", "a", "a", "b"]) == (["", "a", "a", "", ""], True)
    assert filtered(["\n\n", "\nQ:"], ["x\n", "Q", "\n", "Q:"]) == (["x", "", "\nQ", "", ""], True)
    assert filtered(["abcd", "c"], ["ab", "cd"]) == filtered(["abcd", "c"], ["ab", "c"]) == (["", "ab", ""], True)
    assert filtered([], ["a", "b"]) == (["a", "b", ""], False)
    with pytest.raises(UserError, match="--stop must not be empty"):
        StopFilter(["x", ""])


def before_the_first_stop(text: str, stops: list[str]) -> str:
    """By trying each length: the first at which some stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def test_a_stop_string_ends_the_text_wherever_it_is_cut() -> None:
    rng = random.Random(2)
    for _ in range(3000):
        text = "".join(rng.choices("ab ", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("ab ", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        given, stopped = filtered(stops, pieces)
        expected = before_the_first_stop(text, stops)
        assert "".join(given) == expected, (stops, pieces)
        assert stopped == any(stop in text for stop in stops)
        held_back = len(expected) - len("".join(given[:-1]))
        assert held_back < max(map(len, stops), default=1), "no more than may begin a stop string waits"


def rows_of(loaded: Loaded, prompts: list[str], sampling: Sampling, **options: Any) -> list[list[str]]:
    """What each row grew by, step by step."""
    return [list(row) for row in zip(*generate(loaded, prompts, 20, sampling, **options), strict=True)]


def test_a_row_ends_before_its_stop_string_and_the_others_go_on(trained: Trained) -> None:
    loaded = load_model(trained.folder)
    prompts, warm = ["grief 中文", "u", ""], Sampling(temperature=2.0, top_p=1.0, seed=1)
    endless = rows_of(loaded, prompts, warm)
    texts = ["".join(row) for row in endless]
    # From the middle of a step's text to the middle of another's: a stop string that straddles tokens.
    ends = [sum(map(len, endless[1][:n])) for n in (4, 9)]
    stop = texts[1][ends[0] - 1 : ends[1] - 1]
    assert len(stop) > 2 and all(stop not in text for text in (texts[0], texts[2]))
    stopped = rows_of(loaded, prompts, warm, stops=["never", stop])
    assert ["".join(row) for row in stopped] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
    late = rows_of(loaded, prompts[:1], warm, stops=[texts[0] + "x"])
    assert late == [[*[""] * (len(late[0]) - 1), texts[0]]], "all of it may begin the stop string, up to the end"
    assert rows_of(loaded, prompts[:1], warm, stops=[endless[0][0][:1]])[0] == ["", ""], "no further step was computed"


def test_the_likeliest_one_of_one_is_greedy(trained: Trained) -> None:
    loaded, prompts = load_model(trained.folder), ["grief", "moss lamp"]
    greedy = rows_of(loaded, prompts, GREEDY)
    assert rows_of(loaded, prompts, Sampling(temperature=3.0, top_p=1.0, top_k=1)) == greedy
    assert rows_of(loaded, prompts, Sampling(temperature=3.0, top_p=1.0, top_k=300)) != greedy


def test_the_context_is_used_to_its_end_and_not_beyond(trained: Trained) -> None:
    loaded = load_model(trained.folder)
    prompt = "grief"
    room = SEQ_LENGTH - len(loaded.tokenizer.encode(prompt))
    list(generate(loaded, [prompt], room, GREEDY))
    with pytest.raises(
        UserError, match=rf"--max-tokens {room + 1} exceed .*= 40\): ask for at most {room}, or give --beyond-context$"
    ):
        list(generate(loaded, [prompt], room + 1, GREEDY))
    with pytest.raises(
        UserError,
        match=r"the prompt has \d+ tokens; the trained context \(train.seq_length\) is 40: .*--beyond-context$",
    ):
        list(generate(loaded, [prompt, "x" * 400], 1, GREEDY))


def test_beyond_the_context_the_tokens_are_those_of_the_full_forward(trained: Trained) -> None:
    loaded = load_model(trained.folder)
    loaded.model.double()
    for prompt in ("grief", "x" * (2 * SEQ_LENGTH)):
        ids = loaded.tokenizer.encode(prompt)
        assert len(ids) + 50 > SEQ_LENGTH
        pieces = [piece for (piece,) in generate(loaded, [prompt], 50, GREEDY, beyond_context=True)]
        for _ in range(50):
            with torch.no_grad():
                ids.append(int(loaded.model.logits(torch.tensor([ids]))[0, -1].argmax()))
        assert loaded.tokenizer.eos_id not in ids
        assert "".join(pieces) == loaded.tokenizer.decode(ids[-50:])


def test_the_statistics_are_those_of_the_steps(trained: Trained) -> None:
    loaded = load_model(trained.folder)
    ticks = 0

    def clock() -> float:
        nonlocal ticks
        ticks += 1
        return float(ticks)

    size = trained.config.slow.pool_size
    prompt = loaded.tokenizer.encode("grief hill")
    stats = Stats(clock)
    steps = list(generate_ids(loaded.model, [prompt], 11, -1, GREEDY, stats))
    assert len(steps) == 11 and stats.steps == 10
    # A tick for each of the two exchanges, and one on either side of each.
    assert (stats.exchange_seconds, stats.step_seconds, stats.prompt_seconds) == (10 * 2, 10 * 5, 5)
    assert stats.slow_steps == (len(prompt) + 10) // size - len(prompt) // size
    assert stats.lines(1) == [
        "prompt: 5000.0 ms",
        "5000.00 ms a token",
        f"exchanges: 40.0% of this time; the slow path ran in {stats.slow_steps} of 10 steps",
    ]
    assert stats.lines(3)[1] == "5000.00 ms a step of 3 tokens"
    only = Stats(clock)
    list(generate_ids(loaded.model, [prompt], 1, -1, GREEDY, only))
    assert only.lines(1) == ["prompt: 5000.0 ms"]


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

    assert (
        run_command(monkeypatch, run, "--prompt", "moss", *options, "--stop", expected("moss", 4)[6:8], "--stats") == 0
    )
    told = capsys.readouterr()
    assert told.out == expected("moss", 4)[:6] + "\n"
    assert told.err.startswith("prompt: ") and " ms a token\nexchanges: " in told.err
    assert (
        run_command(monkeypatch, run, "--prompt", "moss", "--max-tokens", "60", "--top-k", "1", "--beyond-context") == 0
    )
    greedy = generate(loaded, ["moss"], 60, GREEDY, beyond_context=True)
    assert capsys.readouterr().out == "moss" + "".join(piece for (piece,) in greedy) + "\n"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--prompt", "x" * 400], "train.seq_length"),
        (["--prompt", "a", "--max-tokens", "40"], "ask for at most 39"),
        (["--prompt", "a\udc80"], "lone surrogate"),
        (["--prompt", "a", "--max-tokens", "9", "--stop", ""], "--stop must not be empty"),
        (["--prompt", "a", "--temperature", "inf"], "--temperature"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature"),
        (["--prompt", "a", "--top-p", "nan"], "--top-p"),
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

"""What is not installed is named with the extra that brings it, and is imported by nobody who does not need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastslow_scale import cli
from fastslow_scale.launch import ending
from tests.checkpoints import config_of, random_model, save_run, tokenizer_of
from tests.commands import REPOSITORY, environment

pytestmark = pytest.mark.unit

TINY = REPOSITORY / "configs" / "tiny.yaml"
ASKING = {
    "demo": ("bible", ["data", "demo", "--output", "OUTPUT"]),
    "remote input": (
        "fsspec",
        ["data", "tokenizer", "--input", "s3://b/*.txt", "--vocab-size", "9", "--output", "OUTPUT"],
    ),
    "remote folder": ("fsspec", ["data", "info", "s3://bucket/folder"]),
    "remote shards of a run": ("fsspec", ["train", TINY, "data.path=s3://bucket/folder", "train.run_dir=OUTPUT"]),
    "remote over http": ("aiohttp", ["data", "info", "http://localhost:1/folder"]),
    "wandb": ("wandb", ["train", TINY, "monitor.wandb_project=x", "train.run_dir=OUTPUT"]),
    "wandb of a study": ("wandb", ["ablate", TINY, "monitor.wandb_project=x", "--output", "OUTPUT"]),
    "eval": ("lm_eval", ["eval", "RUN", "--tasks", "x"]),
    "eval, transformers": ("transformers", ["eval", "RUN", "--tasks", "x"]),
    "eval, accelerate": ("accelerate", ["eval", "RUN", "--tasks", "x"]),
}
MESSAGES = {"bible": "demo", "fsspec": "remote", "aiohttp": "remote", "wandb": "wandb"}


@pytest.mark.parametrize(("hidden", "arguments"), ASKING.values(), ids=ASKING)
def test_a_missing_package_is_one_line_with_its_extra(
    hidden: str,
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ending, "first_to_report", lambda: True)  # one process stands for many commands
    monkeypatch.setitem(sys.modules, hidden, None)  # Python's own word for "cannot be imported"
    output = tmp_path / "output"
    words = [str(word).replace("OUTPUT", str(output)).replace("RUN", str(tmp_path / "run")) for word in arguments]
    status = ending.exit_status(lambda: cli.app(words, standalone_mode=False))
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith("error: ")
    assert line.endswith(f"pip install 'fastslow-scale[{MESSAGES.get(hidden, 'eval')}]'"), line
    assert not output.exists(), "refused before anything begins"


def test_a_folder_of_that_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb leaves a folder `wandb` where it runs."""
    from fastslow_scale.extras import refuse_missing

    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(cli.UserError, match="no_such_package is missing"):
        refuse_missing("no_such_package", "wandb", "key = x")


def test_export_and_import_need_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "accelerate", "lm_eval", "wandb", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    model = random_model(config_of(model={"variant": "dense"}))
    save_run(tmp_path / "run", model, tokenizer_of())
    for words in (
        ["export", tmp_path / "run", "--output", tmp_path / "export"],
        ["import", tmp_path / "export", "--output", tmp_path / "imported"],
    ):
        assert (
            ending.exit_status(lambda words=words: cli.app([str(word) for word in words], standalone_mode=False)) == 0
        )


OPTIONAL = ("transformers", "accelerate", "lm_eval", "datasets", "wandb", "fsspec", "aiohttp", "bible")
HIDING = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hide())
"""


def in_a_process_of_its_own(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"NAMES = {OPTIONAL}\n{program}"],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_command_line_imports_no_optional_package() -> None:
    in_a_process_of_its_own("import sys, fastslow_scale.cli; assert not sys.modules.keys() & set(NAMES)")


def test_training_does_without_every_optional_package() -> None:
    """torch, megatron and DeepSpeed take some of them if they are there; nothing of ours does."""
    modules = "cli, train.worker, train.loop, monitor, launch.local, inference.evaluate, study.ablation"
    imports = "\n".join(f"import fastslow_scale.{name}" for name in modules.split(", "))
    in_a_process_of_its_own(f"{HIDING}\n{imports}\nassert not sys.modules.keys() & set(NAMES)")

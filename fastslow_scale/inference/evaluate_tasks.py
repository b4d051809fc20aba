"""A trained model on the tasks of EleutherAI's lm-evaluation-harness (the extra `eval`), by way of its export.

The harness drives the model as Hugging Face's code for it (`inference/hf`), which `fastslow export` puts into a folder.
That code is taken from this package, never from the folder: nothing that a folder brings is executed.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from data_pipeline.errors import UserError
from fastslow_scale.extras import refuse_missing
from fastslow_scale.inference.evaluate_report import finite, table_lines, write_json
from fastslow_scale.inference.export import export
from fastslow_scale.inference.load_export import config_of_export, is_export
from fastslow_scale.parallel.mesh import local_device

BATCH_SIZE = 8
EXTRA, ASKED_BY = "eval", "--tasks"


@dataclass(frozen=True)
class Metric:
    """A value as the harness names it, with its standard error (None: it gives none)."""

    task: str
    name: str
    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskResults:
    """What the harness found.

    Attributes:
        checkpoint: the folder that the model came from, a checkpoint's or an export's.
        harness: version of lm_eval.
        metrics: of each task and each group of tasks.
        tasks: for each task its version, the examples in its context and the documents it was scored on.
        notes: what a user should know, such as a damaged checkpoint that was passed over.
    """

    checkpoint: Path
    harness: str
    metrics: list[Metric]
    tasks: dict[str, dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def refuse_missing_harness() -> None:
    """Raise `UserError` where the harness or what its adapter for Hugging Face models needs is not installed."""
    for module in ("transformers", "accelerate", "lm_eval"):
        refuse_missing(module, EXTRA, ASKED_BY)


def evaluate_tasks(run_or_export: str, tasks: Sequence[str], task_path: Path | None) -> TaskResults:
    """Evaluate on tasks that the harness knows, or that lie as YAML files in the folder `task_path`.

    A run or a checkpoint is exported to a temporary folder first.

    Raises:
        UserError: a package is missing, there is no such task or folder, the model cannot be exported or read, or the
            harness cannot get a task's data.
    """
    refuse_missing_harness()
    if task_path is not None and not task_path.is_dir():
        raise UserError(f"--task-path {task_path} is not a folder")
    if is_export(Path(run_or_export)):
        return _evaluate_export(Path(run_or_export), Path(run_or_export), [], tasks, task_path)
    with tempfile.TemporaryDirectory(prefix="fastslow-eval-") as folder:
        written = export(run_or_export, Path(folder) / "export")
        return _evaluate_export(Path(folder) / "export", written.checkpoint, written.notes, tasks, task_path)


def _evaluate_export(
    folder: Path, checkpoint: Path, notes: list[str], tasks: Sequence[str], task_path: Path | None
) -> TaskResults:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if task_path is None else str(task_path))
    known = set(manager.all_tasks)
    unknown = [task for task in tasks if task not in known]
    if unknown:
        where = "" if task_path is None else f", nor does {task_path} define it"
        raise UserError(f"--tasks {unknown[0]}: lm_eval {lm_eval.__version__} has no such task{where}")
    loaded = _load_tasks(manager, tasks)
    manager.load = lambda names: loaded  # the harness would fetch it all again
    model, tokenizer = load_for_harness(folder)
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH_SIZE),
        tasks=list(tasks),
        task_manager=manager,
        log_samples=False,
    )
    return TaskResults(checkpoint, lm_eval.__version__, _metrics(found), _tasks(found), notes)


def _load_tasks(manager: Any, tasks: Sequence[str]) -> Any:
    """The tasks with their data. Raises `UserError`: a definition is wrong, data cannot be had, or it is refused."""
    try:
        loaded = manager.load(list(tasks))
    except Exception as error:  # a definition may hold anything, and fetching raises what several libraries raise
        reason = " ".join(str(error).split())
        raise UserError(f"--tasks {','.join(tasks)}: {type(error).__name__}: {reason}") from None
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"--tasks: {name} executes what the model writes, which is not done here")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"--tasks: {name} asks about more than text")
    return loaded


def load_for_harness(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of an export as transformers' classes, in fp32 on this rank's device.

    Raises:
        UserError: config.json or the weights are damaged or missing.
    """
    import transformers

    from fastslow_scale.inference.hf.modeling_fastslow import FastSlowForCausalLM
    from fastslow_scale.inference.hf.tokenization_fastslow import FastSlowTokenizer

    config_of_export(folder)
    coupled = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "fastslow"
    family = FastSlowForCausalLM if coupled else transformers.AutoModelForCausalLM
    transformers.utils.logging.set_verbosity_error()
    try:
        model, read = family.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        tokenizer = FastSlowTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be read: {str(error).splitlines()[0]}") from None
    if read["missing_keys"]:
        raise UserError(f"{folder / 'model.safetensors'} lacks {min(read['missing_keys'])}")
    return model.float().to(local_device()).eval(), tokenizer


def _metrics(found: Any) -> list[Metric]:
    """`acc,none` with `acc_stderr,none`: a name and the filter of the answers that it was computed from."""
    metrics = []
    for task, values in (found["results"] | found.get("groups", {})).items():
        for key, value in values.items():
            name, comma, answers = key.partition(",")
            if not comma or name.endswith("_stderr") or isinstance(value, str):
                continue
            stderr = values.get(f"{name}_stderr,{answers}")
            error = None if stderr is None or isinstance(stderr, str) else float(stderr)
            metrics.append(Metric(task, name if answers == "none" else f"{name} ({answers})", float(value), error))
    return metrics


def _tasks(found: Any) -> dict[str, dict[str, Any]]:
    return {
        task: {
            "version": found["versions"].get(task),
            "examples_in_context": found["n-shot"].get(task),
            "documents": counts["effective"],
        }
        for task, counts in found["n-samples"].items()
    }


def lines(found: TaskResults) -> list[str]:
    """The numbers for people."""
    table: list[tuple[str, ...]] = [("task", "metric", "value", "standard error", "in context", "documents")]
    for metric in found.metrics:
        task = found.tasks.get(metric.task, {})
        error = "" if metric.stderr is None or math.isnan(metric.stderr) else f"{metric.stderr:.4f}"
        counts = (str(task.get("examples_in_context", "")), str(task.get("documents", "")))
        table.append((metric.task, metric.name, f"{metric.value:.4f}", error, *counts))
    return [f"checkpoint  {found.checkpoint}", f"harness     lm_eval {found.harness}", "", *table_lines(table)]


def write(found: TaskResults, output: Path) -> None:
    """Write the numbers as JSON. Raises `UserError`: they cannot be written."""
    tasks: dict[str, dict[str, Any]] = {name: {**described, "metrics": {}} for name, described in found.tasks.items()}
    for metric in found.metrics:
        numbers = {"value": finite(metric.value), "stderr": None if metric.stderr is None else finite(metric.stderr)}
        tasks.setdefault(metric.task, {"metrics": {}})["metrics"][metric.name] = numbers
    content = {"checkpoint": str(found.checkpoint), "lm_eval": found.harness, "tasks": tasks}
    write_json(content, output)

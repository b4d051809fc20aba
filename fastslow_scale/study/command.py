"""`fastslow ablate` from a planned study to its report."""

from __future__ import annotations

from rich.console import Console

from data_pipeline.errors import UserError
from fastslow_scale.config_file import load_config
from fastslow_scale.launch.local import available_cores
from fastslow_scale.study.ablation import ablate
from fastslow_scale.study.ablation_report import print_ablation, write_report
from fastslow_scale.study.arms import size_of
from fastslow_scale.study.execute import visible_gpus
from fastslow_scale.study.runs import Study, open_study


def run_study(study: Study, jobs: int | None, nproc: int | None, console: Console, command: str) -> bool:
    """Do the runs, print and write the report; False if a signal stopped it.

    Raises:
        UserError: the layout does not fit, or needs more GPUs than there are, or OUTPUT holds another study; nothing
            has been started then.
        RunError: a run failed.
    """
    config = load_config(study.config_path, study.overrides)
    ranks = nproc or config.parallel.tensor_parallel_size
    config.data_parallel_size(ranks)
    gpus = visible_gpus()
    if gpus and (jobs or 1) * ranks > len(gpus):
        raise UserError(f"--jobs x ranks of a run must be at most the {len(gpus)} GPUs (got {jobs or 1} x {ranks})")
    side_by_side = jobs or max(1, (len(gpus) or available_cores()) // ranks)
    open_study(study)
    for arm in study.arms:
        size = size_of(load_config(study.config_path, [*study.overrides, *arm.overrides]))
        line = f"{arm.name:24} {size.parameters:>13,} parameters  {size.flops_per_token:.4g} FLOPs a token"
        console.print(line, markup=False, highlight=False)
    found = ablate(study, side_by_side, ranks, console)
    if found is None:
        return False
    print_ablation(found, console)
    for path in write_report(found, study.output, command):
        print(path)
    return True

"""In a folder on PYTHONPATH this slows the steps of a run down, without any load, so that a test can meet one.

SLOW_STEPS=SECONDS,STARTS: a step lasts that much longer, in the first so many starts of a job of SLURM. Python imports
this module by itself.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

SECONDS, STARTS = os.environ.get("SLOW_STEPS", "0,0").split(",")


class _Slower(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "fastslow_scale.train.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_slow_down(module):
            load(module)
            step = module.Trainer.train_step

            def slower(*arguments, **options):
                time.sleep(float(SECONDS))
                return step(*arguments, **options)

            module.Trainer.train_step = slower

        spec.loader.exec_module = load_and_slow_down
        return spec


if int(os.environ.get("SLURM_RESTART_COUNT", "0")) < int(STARTS):
    sys.meta_path.insert(0, _Slower())

"""What every rank imports, imported once by the server that ranks are forked from (see `ranks.py`)."""

import os
import warnings

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.filterwarnings("ignore", module="torch")
warnings.filterwarnings("ignore", module="megatron")

import deepspeed  # noqa: E402, F401

import fastslow_scale.model.model  # noqa: E402
import fastslow_scale.train.engine  # noqa: E402, F401

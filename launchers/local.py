"""Train on this machine: takes what `fastslow train` takes (CONFIG [section.key=value ...] [--nproc N] ...)."""

import sys

from fastslow_scale.cli import main

if __name__ == "__main__":
    sys.argv = ["fastslow", "train", *sys.argv[1:]]
    main()

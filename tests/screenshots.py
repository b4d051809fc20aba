"""Pictures of a run in TensorBoard, for the documentation.

python -m tests.screenshots RUN --output docs/images
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.browser import browser, tensorboard

PAGES = {
    "tensorboard_overview": ("#custom_scalars", ("overview", "size of the gates", "seconds of a step, by part")),
    "tensorboard_histograms": ("#histograms", ("coupling/gate/0",)),
    "tensorboard_position": ("#images", ("loss/by_position",)),
}
DRAWN = (
    "return performance.now() - Math.max(...performance.getEntriesByType('resource').map(e => e.responseEnd)) > 3000"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tensorboard(options.run) as address, browser() as window:
        for name, (page, texts) in PAGES.items():
            window.open(address + page, *texts)
            window.until(DRAWN)
            path = options.output / f"{name}.png"
            window.driver.save_screenshot(str(path))
            print(path)


if __name__ == "__main__":
    main()

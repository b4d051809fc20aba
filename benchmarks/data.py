"""Every table of the data pipeline in one run: encoding, reading, resume, memory, and a run's time spent waiting.

python benchmarks/data.py [--run runs/tiny] [--mosaic]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import encoding
import reading


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run folder whose waiting for data is to be told")
    parser.add_argument("--mosaic", action="store_true", help="MosaicML streaming too")
    parser.add_argument("--mb", type=float, default=60, help="size of the made-up corpus to encode")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        rows = scratch / "rows"
        encoding.write_rows(rows, int(options.mb * 1e6), num_files=4)
        print("## Encoding\n")
        corpora = {"made up, .jsonl": [str(rows)], "standard library": encoding.interpreter_sources()}
        for line in encoding.encoding_table(corpora):
            print(line, flush=True)
        print("\n## Reading\n", flush=True)
        print(reading.rates_table(16_384, 2048, batches=150, rounds=5, with_mosaic=options.mosaic, scratch=scratch))
        print("\n## From a resume to the first batch\n", flush=True)
        print(reading.resume_table(10**8, rounds=5, scratch=scratch))
        print("\n## Memory of the reader\n", flush=True)
        print(reading.memory_table(10**5, scratch))
        if options.run:
            print("\n## Waiting\n", flush=True)
            print(reading.waiting_table(options.run))


if __name__ == "__main__":
    main()

"""The versions that decide a result. Reads what is installed without importing it."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = ("torch", "deepspeed", "megatron-core", "webdataset", "sentencepiece", "fastslow-scale")


def versions() -> list[str]:
    """`name version` of Python and of every package whose version can change a result."""
    lines = [f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} (not installed as a package)")
    return lines

"""Packages that only some commands need: imported when they are, or one line that says how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from data_pipeline.errors import UserError


def require(module: str, extra: str, asked_by: str) -> ModuleType:
    """Import a package that one of this project's extras brings.

    asked_by: the option or key that needs it, for the message.

    Raises:
        UserError: it, or a package that it needs itself, is not installed.
    """
    refuse_missing(module, extra, asked_by)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(error.name or module, extra, asked_by) from None


def refuse_missing(module: str, extra: str, asked_by: str) -> None:
    """As `require`, without importing it: long before it is needed, and in processes that never need it."""
    if not _is_installed(module):
        raise _missing(module, extra, asked_by)


def _is_installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None  # a mere folder of that name has no origin


def _missing(module: str, extra: str, asked_by: str) -> UserError:
    return UserError(f"{asked_by}: the package {module} is missing: pip install 'fastslow-scale[{extra}]'")

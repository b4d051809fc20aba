"""A config from a YAML file and `section.key=value` overrides, and its mistakes in words for people."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from data_pipeline.errors import UserError
from fastslow_scale.config import Config


def load_config(path: Path | str, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, validate.

    Raises:
        UserError: no such file, not YAML, unknown key (with the nearest known one), wrong type, broken rule.
    """
    path = Path(path)
    return config_of(_read_yaml(path), path, overrides)


def config_of(tree: dict[str, Any], path: Path, overrides: Iterable[str]) -> Config:
    """`load_config` for a tree that came from `path` and is changed here.

    Raises:
        UserError: as `load_config`.
    """
    given_on_command_line: set[str] = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = key.split(".")
        if not equals or len(parts) != 2 or not all(parts):
            raise UserError(f"override {override!r} must look like section.key=value")
        try:
            value = text if _is_path(parts[0], parts[1]) and text != "null" else yaml.safe_load(text) if text else None
        except (yaml.YAMLError, ValueError, RecursionError):
            raise UserError(f"{key} has a value that is not YAML (got {text!r}) on the command line") from None
        section = tree.setdefault(parts[0], {})
        if not isinstance(section, dict):
            raise UserError(f"{parts[0]} must be a section of keys in {path}")
        section[parts[1]] = value
        given_on_command_line.add(key)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(_one_line(error, path, given_on_command_line)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"config {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config {path} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise UserError(f"config {path} is not YAML{where}: {problem}") from None
    if not isinstance(tree, dict):
        raise UserError(f"config {path} must hold sections such as model: and train:")
    return {str(name): section for name, section in tree.items()}


def _is_path(section: str, key: str) -> bool:
    """Whether this key holds a path or URL, whose text is taken as it stands: runs/007 and 2026-01-01 are names."""
    owner = Config.model_fields.get(section)
    field = _fields(owner.annotation).get(key) if owner else None
    return field is not None and bool({Path, str} & {field.annotation, *typing.get_args(field.annotation)})


def _one_line(error: ValidationError, path: Path, given_on_command_line: set[str]) -> str:
    """Turn pydantic's first error into `key what (got value) in file`."""
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    location = [str(part) for part in first["loc"]]
    depth = 2 if len(location) < 4 else 4  # data.sources.0.weight is a key, optimizer.betas.0 a part of a value
    key, value, rule = ".".join(location[:depth]), first["input"], first["msg"]
    context = first.get("ctx", {})
    if first["type"] == "value_error" and "|" in rule:
        key, value, rule = rule.removeprefix("Value error, ").split("|", 2)
    source = "on the command line" if ".".join(key.split(".")[:2]) in given_on_command_line else f"in {path}"
    if first["type"] == "extra_forbidden":
        return f"{key} is not a known key {source}{_nearest(location)}"
    if first["type"] == "missing" and len(location) == 3:
        return f"{key} holds too few values {source}"
    if first["type"] == "missing":
        return f"{key} is missing {source}"
    limits = {
        "greater_than_equal": "must be at least {ge}",
        "greater_than": "must be greater than {gt}",
        "less_than_equal": "must be at most {le}",
        "less_than": "must be less than {lt}",
        "literal_error": "must be one of {expected}",
    }
    if first["type"] in limits:
        rule = limits[first["type"]].format(**{k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()})
    elif first["type"] != "value_error":
        rule = rule.replace("Input should be", "must be").replace(", unable to parse string as an integer", "")
        rule = rule.replace(", unable to parse string as a number", "")
    if first["type"] == "too_short":
        rule = "must not be empty"
    return f"{key} {rule} (got {value}) {source}"


def _nearest(location: list[str]) -> str:
    """` (did you mean ...?)` for an unknown key, or nothing."""
    sections = Config.model_fields
    if len(location) == 1:
        known: Mapping[str, Any] = sections
        prefix = ""
    else:
        known = typing.cast(type[BaseModel], sections[location[0]].annotation).model_fields
        if len(location) == 4:
            known = typing.get_args(known[location[1]].annotation)[0].model_fields
        prefix = ".".join(location[:-1]) + "."
    match = difflib.get_close_matches(location[-1], list(known), n=1, cutoff=0.5)
    if not match:
        owners = [name for name, field in sections.items() if location[-1] in _fields(field.annotation)]
        return f" (did you mean {owners[0]}.{location[-1]}?)" if owners else ""
    return f" (did you mean {prefix}{match[0]}?)"


def _fields(annotation: Any) -> Mapping[str, Any]:
    if isinstance(annotation, types.UnionType):
        return {}
    return getattr(annotation, "model_fields", {})

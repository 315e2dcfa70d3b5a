"""From a YAML file and command-line overrides to a checked `Config`, and back to text."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from comppo_mcore.config.algorithm import fill_algorithm
from comppo_mcore.config.schema import Config, Section
from comppo_mcore.config.yaml12 import parse, render
from comppo_mcore.errors import UserError

Tree = dict[str, Any]

# What may differ when a run is continued: where it lies, how long it goes on, and what is watched and kept.
FREE_FIELDS = frozenset(
    {
        "run.name",  # a run folder may be moved
        "run.dir",
        "run.allow_config_change",
        "parallel.timeout_minutes",
        "reward.workers",
        "train.max_bad_steps",
        "train.steps",
        "train.eval_every",
        "train.eval_problems",
        "train.eval_majority",
        "train.save_every",
        "train.keep_last",
        "train.keep_best",
        "log.tensorboard",
        "log.wandb",
        "log.wandb_project",
        "log.progress",
    }
)


class Difference(NamedTuple):
    """One dotted field in which two configurations differ; None also where a section is absent."""

    field: str
    first: Any
    second: Any


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """A run's configuration: overrides over the file over the schema's defaults, then `fill_algorithm`.

    Args:
        path: a YAML file of sections; `extends: other.yaml` at its top lays it over another file.
        overrides: `key=value` with a dotted key and a YAML value, e.g. `gate.calibrate.reach=0.8`.

    Raises:
        UserError: a file that cannot be read, an unknown key, a value of the wrong type or range.
    """
    tree = _merge(_read(Path(path), ()), _parse_overrides(overrides))
    _refuse_unknown(tree)
    return fill_algorithm(_validate(_merge(Config().model_dump(mode="json"), tree)))


def dump(config: Config) -> str:
    """YAML text with every field, which `load` reads back as the same configuration."""
    return render(config.model_dump(mode="json"))


def diff(first: Config, second: Config) -> list[Difference]:
    """Fields outside `FREE_FIELDS` in which two configurations differ."""
    a, b = (dict(_leaves(config.model_dump(mode="json"))) for config in (first, second))
    fields = [field for field in {**a, **b} if field not in FREE_FIELDS]
    return [Difference(f, a.get(f), b.get(f)) for f in fields if a.get(f) != b.get(f)]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# ---------------------------------------------------------------------------- reading


def _read(path: Path, extended_by: tuple[Path, ...]) -> Tree:
    """The file's sections over those of the file it extends."""
    if path.resolve() in extended_by:
        raise UserError(f"config file {path} extends itself; remove its key extends")
    try:
        tree = parse(path.read_text(encoding="utf-8"), f"config file {path}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"config file {path} cannot be read: {reason}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"config file {path} holds no sections; write keys such as `train:` at its top")
    base = tree.pop("extends", None)
    if base is None:
        return _merge({}, tree)
    return _merge(_read(path.parent / str(base), (*extended_by, path.resolve())), tree)


def _merge(base: Tree, top: Mapping[str, Any]) -> Tree:
    """`top` laid over `base` section by section; a dotted key of `top` reaches into sections."""
    merged = dict(base)
    for key, value in top.items():
        head, _, rest = str(key).partition(".")
        if rest:
            value = {rest: value}
        if isinstance(value, dict):
            under = merged.get(head)
            value = _merge(under if isinstance(under, dict) else {}, value)
        merged[head] = value
    return merged


def _parse_overrides(overrides: Sequence[str]) -> Tree:
    tree: Tree = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (key and equals):
            raise UserError(f"override {override!r} is not key=value; write for example train.steps=3")
        tree = _merge(tree, {key: _override_value(key, text)})
    return tree


def _override_value(key: str, text: str) -> Any:
    """A field of text takes the words as they stand (`null` where it may be absent), any other YAML."""
    types = _types(FIELDS.get(key))
    if str in types:
        return None if text == "null" and NoneType in types else text
    return parse(text, f"override {key}")


# ---------------------------------------------------------------------------- checking


def _types(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of `X | None`, or the type itself."""
    return get_args(annotation) if NoneType in get_args(annotation) else (annotation,)


def _section(annotation: Any) -> type[Section] | None:
    found = [t for t in _types(annotation) if isinstance(t, type) and issubclass(t, Section)]
    return found[0] if found else None


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, info in section.model_fields.items():
        yield prefix + name, info.annotation
        inner = _section(info.annotation)
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


FIELDS: dict[str, Any] = dict(_fields(Config))  # every dotted key, sections included, and its type


def _refuse_unknown(tree: Mapping[str, Any], prefix: str = "") -> None:
    for key, value in tree.items():
        field = prefix + key
        if field not in FIELDS:
            shown = f" (value {json.dumps(value, default=str)})" if not isinstance(value, dict) else ""
            raise UserError(f"unknown key {field}{shown}; the nearest known key is {_nearest(field)}")
        if isinstance(value, dict) and _section(FIELDS[field]):
            _refuse_unknown(value, f"{field}.")


def _nearest(unknown: str) -> str:
    """The known key most alike, counting the whole path and its last name equally."""

    def likeness(known: str) -> float:
        pairs = ((unknown, known), (unknown.rpartition(".")[2], known.rpartition(".")[2]))
        return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)

    return max(FIELDS, key=likeness)


def _validate(tree: Tree) -> Config:
    # Strict JSON mode takes whole numbers as float and lists as tuples, but never text as a number.
    try:
        return Config.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first, *others = error.errors()
    path = first["loc"][:-1] if first["type"] == "missing" else first["loc"]  # the list, not its absent item
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    more = f" (and {len(others)} more)" if others else ""
    return f"{field} is {json.dumps(first['input'])}; it should be {_expectation(first)}{more}"


def _expectation(error: Any) -> str:
    """What pydantic wanted, in the words of a YAML author."""
    plain = {
        "model_type": "a section of keys and values",
        "tuple_type": "a list",
        "string_type": "text",
        "bool_type": "true or false",
        "int_type": "a whole number",
        "float_type": "a number",
        "missing": "a longer list",
    }
    if error["type"] == "too_long":
        return f"a list of {error['ctx']['max_length']}"
    return plain.get(error["type"]) or error["msg"].removeprefix("Input should be ")

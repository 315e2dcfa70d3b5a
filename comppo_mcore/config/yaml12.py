"""YAML with the scalars of version 1.2: `1e-6` is a number, `off` and `no` are text, keys are unique.

PyYAML reads version 1.1, where `lr: 1e-6` is text and `preset: off` is false.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from comppo_mcore.errors import UserError

# Tag, pattern, the characters it may begin with ("" for the empty scalar), and the value.
SCALARS = (
    ("tag:yaml.org,2002:null", r"null|~|", ["n", "~", ""], lambda _: None),
    ("tag:yaml.org,2002:bool", r"true|false", list("tf"), lambda text: text == "true"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", list("-+0123456789"), int),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
        list("-+.0123456789"),
        float,
    ),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value} stands twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """In double quotes where it holds what PyYAML would leave bare and fold, such as U+0085."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


def _constructor(convert: Callable[[str], Any]) -> Callable[[Any, Any], Any]:
    return lambda loader, node: convert(loader.construct_scalar(node))


for _tag, _pattern, _first, _convert in SCALARS:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)
    _Loader.add_constructor(_tag, _constructor(_convert))
_Dumper.add_representer(str, _represent_text)


def parse(text: str, source: str) -> Any:
    """The value of a YAML text.

    Args:
        text: one YAML document.
        source: its name in the error message.

    Raises:
        UserError: the text is not YAML, or a mapping has a key twice.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it holds an unreadable character"
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"{source} is not readable as YAML{where}: {problem}") from None


def render(value: Any) -> str:
    """The YAML text that `parse` reads back as the same value, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)

"""Problems, and the readers that make them from JSONL and parquet files.

The column layout of DAPO-Math-17K is read with `data.prompt_key: prompt` (a list of role/content
messages) and `data.answer_key: reward_model.ground_truth`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet

from comppo_mcore.config.schema import DataConfig
from comppo_mcore.errors import UserError

PLACEHOLDER = "{prompt}"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """A prompt with a checkable answer.

    `task` names the reasoning-gym task whose scorer judges the answer, and `metadata` is then the
    entry that scorer reads; without a task the mathematical verifier compares with `answer`.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str
    source: str
    task: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """A prompt with the response a supervised warm start imitates."""

    id: str
    messages: tuple[Message, ...]
    response: str


@dataclass(frozen=True)
class Record:
    """One line of a JSONL file or one row of a parquet file, with where it came from."""

    field: str  # dotted name of the config field that holds the path
    path: Path
    where: str  # "line 3" or "row 3", counted from 1
    values: Mapping[str, object]

    def error(self, complaint: str) -> UserError:
        return UserError(f"{self.field} = '{self.path}': {self.where} {complaint}")

    @property
    def id(self) -> str:
        return f"{self.path.name}:{self.where.split()[-1]}"


def build_messages(prompt: str | tuple[Message, ...], data: DataConfig) -> tuple[Message, ...]:
    """Wrap a prompt in `data.template` and put `data.system_prompt` before it.

    Args:
        prompt: the user's text, or a whole conversation whose last user message is wrapped.
        data: the data section; a conversation that has a system message keeps its own.

    Returns:
        The conversation a chat template renders.

    Raises:
        UserError: `data.template` lacks `{prompt}`.
    """
    if PLACEHOLDER not in data.template:
        raise UserError(
            f"data.template = {data.template!r} must contain {PLACEHOLDER}, where the prompt goes"
        )
    messages = list((Message("user", prompt),) if isinstance(prompt, str) else prompt)
    last_user = max(i for i, message in enumerate(messages) if message.role == "user")
    wrapped = data.template.replace(PLACEHOLDER, messages[last_user].content)
    messages[last_user] = Message("user", wrapped)
    if data.system_prompt is not None and messages[0].role != "system":
        messages.insert(0, Message("system", data.system_prompt))
    return tuple(messages)


def read_problems(path: str | Path, data: DataConfig, field_name: str = "data.path") -> list[Problem]:
    """Read every record of a prompt file as a problem, the first of each distinct prompt only.

    Public prompt files repeat prompts (DAPO-Math-17K holds each about a hundred times), and a repeated
    prompt would sit on both sides of a held-out split.

    Args:
        path: a .jsonl or .parquet file.
        data: names the keys and the message template.
        field_name: dotted config field that holds `path`, for error messages.

    Returns:
        Problems in file order, never empty.

    Raises:
        UserError: the file or one of its records cannot be used.
    """
    problems: dict[tuple[Message, ...], Problem] = {}
    for record in read_records(Path(path), (data.prompt_key, data.answer_key), field_name):
        messages = build_messages(_prompt_of(record, data.prompt_key), data)
        if messages not in problems:
            answer = _answer_of(record, data.answer_key)
            problems[messages] = Problem(record.id, messages, answer, source=record.path.name)
    return list(problems.values())


def read_examples(
    path: str | Path, data: DataConfig, response_key: str, field_name: str = "sft.path"
) -> list[Example]:
    """Read prompt–response pairs for the supervised warm start.

    Args:
        path: a .jsonl or .parquet file.
        data: names the prompt key and the message template.
        response_key: dotted key of the response text.
        field_name: dotted config field that holds `path`, for error messages.

    Returns:
        Examples in file order, never empty.

    Raises:
        UserError: the file or one of its records cannot be used.
    """
    examples = []
    for record in read_records(Path(path), (data.prompt_key, response_key), field_name):
        response = lookup(record.values, response_key)
        if not isinstance(response, str) or not response.strip():
            raise record.error(f"has no response under sft.response_key = '{response_key}'")
        messages = build_messages(_prompt_of(record, data.prompt_key), data)
        examples.append(Example(record.id, messages, response))
    return examples


def split_held_out(
    problems: list[Problem], held_out: list[Problem] | None, holdout: int
) -> tuple[list[Problem], list[Problem]]:
    """Part training problems from held-out ones so that no prompt is in both.

    Args:
        problems: problems with distinct prompts.
        held_out: held-out problems from a file of their own, or None to take the last ones.
        holdout: how many of the last problems to hold out when there is no such file.

    Returns:
        (training problems, held-out problems), neither empty.

    Raises:
        UserError: nothing would be left to train on, or nothing to evaluate on.
    """
    if held_out is not None:
        unseen = {problem.messages for problem in held_out}
        train = [problem for problem in problems if problem.messages not in unseen]
        if not train:
            raise UserError("data.eval_path holds every prompt of data.path; give it prompts of its own")
        return train, held_out
    if holdout == 0:
        raise UserError(
            "data.eval_holdout is 0 with data.eval_path null, which leaves nothing to evaluate on; "
            "set one of them"
        )
    if holdout >= len(problems):
        raise UserError(
            f"data.eval_holdout = {holdout} leaves nothing to train on, because data.path has "
            f"{len(problems)} distinct prompts; use a smaller number or set data.eval_path"
        )
    cut = len(problems) - holdout
    return problems[:cut], problems[cut:]


def read_records(path: Path, keys: Iterable[str], field_name: str) -> Iterator[Record]:
    """Yield the records of a file, in order.

    Args:
        path: a .jsonl or .parquet file.
        keys: dotted keys that will be looked up; of a parquet file no other column is read.
        field_name: dotted config field that holds `path`, for error messages.

    Raises:
        UserError: the file is missing, unreadable, of another type, or holds no record.
    """
    if not path.is_file():
        raise UserError(f"{field_name} = '{path}' is not a file; give a .jsonl or .parquet file")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UserError(
            f"{field_name} = '{path}' ends in '{path.suffix}'; only .jsonl and .parquet files are read"
        )
    is_empty = True
    try:
        for record in readers[path.suffix](path, tuple(keys), field_name):
            is_empty = False
            yield record
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{field_name} = '{path}' cannot be read ({reason}); give a readable file") from error
    if is_empty:
        raise UserError(f"{field_name} = '{path}' holds no records; it needs at least one")


def lookup(values: Mapping[str, object], key: str) -> object:
    """Value of a dotted key, or None; a column whose own name holds the dots is preferred."""
    if key in values:
        return values[key]
    found: object = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _read_jsonl(path: Path, keys: tuple[str, ...], field_name: str) -> Iterator[Record]:
    del keys  # a line is parsed as a whole
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"line {number}"
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                place = Record(field_name, path, where, {})
                raise place.error(f"is not valid JSON ({error.msg} at column {error.colno})") from error
            record = Record(field_name, path, where, values)
            if not isinstance(values, dict):
                raise record.error(f"is a JSON {type(values).__name__}; every line must hold one object")
            yield record


def _read_parquet(path: Path, keys: tuple[str, ...], field_name: str) -> Iterator[Record]:
    table = pyarrow.parquet.ParquetFile(path)
    wanted = {name for key in keys for name in (key, key.split(".")[0])}
    columns = [name for name in table.schema_arrow.names if name in wanted]
    number = 0
    for batch in table.iter_batches(columns=columns):
        for values in batch.to_pylist():
            number += 1
            yield Record(field_name, path, f"row {number}", values)


def _prompt_of(record: Record, key: str) -> str | tuple[Message, ...]:
    prompt = lookup(record.values, key)
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(item) for item in prompt):
        messages = tuple(Message(item["role"], item["content"]) for item in prompt)
        if any(message.role == "user" for message in messages):
            return messages
    raise record.error(
        f"has no prompt under data.prompt_key = '{key}'; a text or a list of role/content messages "
        "with a user message is needed"
    )


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and all(isinstance(item.get(key), str) for key in ("role", "content"))


def _answer_of(record: Record, key: str) -> str:
    answer = lookup(record.values, key)
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
    if not is_number and not (isinstance(answer, str) and answer.strip()):
        raise record.error(f"has no answer under data.answer_key = '{key}'; a text or a number is needed")
    return str(answer).strip()

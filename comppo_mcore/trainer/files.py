"""Files of a run folder: atomic replacement, and the record of every step in `metrics.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from comppo_mcore.errors import UserError

MACHINE_PREFIXES = ("time/", "memory/")  # keys that two equal runs need not agree on


def write_text_atomic(path: Path, text: str) -> None:
    """Replace the file at `path`: after a crash at any moment it holds either the old text or the new.

    The temporary file has a fixed name, so that crashes leave at most one behind; a path has one writer.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace the file at `path` by `value` as JSON. NaN and infinities are refused with ValueError."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """What `write_json_atomic` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable: the new name lives in the folder, not in the file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a `metrics.jsonl` in file order; [] when there is none; a torn last line is left out.

    Raises:
        UserError: a line before the last is not a record.
    """
    return [record for record, _ in _records(path)]


def without_machine_keys(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record is reproducible: everything but seconds and bytes."""
    return {key: value for key, value in record.items() if not key.startswith(MACHINE_PREFIXES)}


class MetricsFile:
    """Append-only `metrics.jsonl`: one record a step, in rising order, each step once.

    Opening it drops every record of a step after `last_step`, the last one the restored checkpoint covers
    (−1 for a fresh start): those steps will be trained and written again. It follows that the record of a
    step must be appended *before* the checkpoint of that step is saved.

    A record goes out in a single write, so SIGKILL leaves it whole or absent (torn by a full disk at worst),
    and is synced, so that it also outlives the machine. Floats are written as the shortest decimal that reads
    back as the same bits.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        kept = [(record["step"], line) for record, line in _records(path) if record["step"] <= last_step]
        write_text_atomic(path, "".join(line + "\n" for _, line in kept))
        self._last_step = kept[-1][0] if kept else -1
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the record of `step`.

        Raises:
            ValueError: the step does not come after the last one, or a number is NaN or infinite.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} is written after step {self._last_step}")
        line = json.dumps({"step": step, **metrics}, ensure_ascii=False, allow_nan=False) + "\n"
        _write_all(self._descriptor, line.encode())
        os.fsync(self._descriptor)
        self._last_step = step

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _records(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Parsed records with the lines they came from, which a rewrite copies unchanged."""
    if not path.exists():
        return []
    # Bytes first: a line can be torn inside a character.
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    records = [_record(line) for line in lines]
    if records[-1] is None:
        lines, records = lines[:-1], records[:-1]
    for number, record in enumerate(records, start=1):
        if record is None:
            raise UserError(
                f"{path} line {number} is not a metrics record: restore the file, or move it away."
            )
    return [
        (record, line.decode()) for record, line in zip(records, lines, strict=True) if record is not None
    ]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # of JSON and of UTF-8 alike
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None

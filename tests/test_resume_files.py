"""Files of a run folder under SIGKILL: atomic replacement, and metrics.jsonl with every step exactly once."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from comppo_mcore.errors import UserError
from comppo_mcore.trainer.files import (
    MetricsFile,
    read_json,
    read_metrics,
    without_machine_keys,
    write_json_atomic,
    write_text_atomic,
)

# Appends records of many lengths until killed; says when it has begun.
_APPENDER = """
import sys
from pathlib import Path
from comppo_mcore.trainer.files import MetricsFile
file = MetricsFile(Path(sys.argv[1]), last_step=int(sys.argv[2]))
step = int(sys.argv[2]) + 1
while True:
    file.append(step, {f"key/{i}": step + i / 7 for i in range(step % 400)})
    print(step, flush=True)
    step += 1
"""

TEXT_SIZE = 2_000_000

# Replaces one file over and over, by texts that are all of one letter.
_REPLACER = f"""
import sys
from pathlib import Path
from comppo_mcore.trainer.files import write_text_atomic
while True:
    for letter in "abcdefgh":
        write_text_atomic(Path(sys.argv[1]), letter * {TEXT_SIZE})
        print(flush=True)
"""


def _kill_after(code: str, lines: int, *arguments: str) -> str:
    """Run `code`, SIGKILL it once it has printed `lines` lines; what it printed last."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        for _ in range(lines):
            last = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        last = ([last, *process.stdout.read().splitlines()])[-1]
    assert process.returncode == -signal.SIGKILL
    return last.strip()


def _record(step: int) -> dict[str, float]:
    return {f"key/{i}": step + i / 7 for i in range(step % 400)}


def test_sigkill_between_and_inside_appends_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    last_step = -1
    for lines, back in ((12, 4), (9, 3), (15, 0)):
        written = int(_kill_after(_APPENDER, lines, str(path), str(last_step)))
        steps = [record["step"] for record in read_metrics(path)]
        assert steps == list(range(len(steps)))
        assert steps[-1] in (written, written + 1), "a record that was reported written is there"
        last_step = written - back  # of the checkpoint that is restored
    with MetricsFile(path, last_step) as file:
        file.append(last_step + 1, _record(last_step + 1))
    assert read_metrics(path) == [{"step": step, **_record(step)} for step in range(last_step + 2)]


def test_sigkill_inside_a_replacement_leaves_an_old_or_a_new_file(tmp_path: Path) -> None:
    """What a reader finds while the file is being replaced is what a kill at that moment would leave."""
    path = tmp_path / "state.txt"
    command = [sys.executable, "-c", _REPLACER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        texts = [path.read_bytes() for _ in range(150)]
        process.kill()
    for text in (*texts, path.read_bytes()):
        assert len(text) == TEXT_SIZE
        assert text.count(text[:1]) == TEXT_SIZE, "two texts are mixed"
    assert len(set(texts)) > 1, "the file was replaced while it was read"
    assert len(os.listdir(tmp_path)) <= 2, "at most one temporary file stays behind"


def test_resume_drops_the_records_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, last_step=-1) as file:
        for step in range(6):
            file.append(step, {"x": step / 3})
    kept = path.read_bytes().split(b"\n")[:4]
    with MetricsFile(path, last_step=3) as file:
        assert path.read_bytes().split(b"\n") == [*kept, b""], "kept lines are the same bytes"
        with pytest.raises(ValueError, match="step 3 is written after step 3"):
            file.append(3, {})
        file.append(4, {"x": 40.0})
    assert read_metrics(path) == [{"step": s, "x": s / 3} for s in range(4)] + [{"step": 4, "x": 40.0}]
    MetricsFile(path, last_step=-1).close()
    assert read_metrics(path) == [], "a fresh start keeps nothing"


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "x": 0.', b'{"step": 2, "\xce', b"\0\0\0\0", b"{", b'{"step": 2, "x": 1.5']
)
def test_torn_last_line_is_dropped_on_resume(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "x": 0.5}\n{"step": 1, "x": 0.25}\n' + torn)
    assert [record["step"] for record in read_metrics(path)] == [0, 1]
    with MetricsFile(path, last_step=5) as file:
        file.append(2, {"x": 0.125})
    assert read_metrics(path) == [{"step": 0, "x": 0.5}, {"step": 1, "x": 0.25}, {"step": 2, "x": 0.125}]


def test_only_the_newline_torn_off_loses_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "x": 0.5}\n{"step": 1, "x": 0.25}')
    MetricsFile(path, last_step=1).close()
    assert path.read_bytes() == b'{"step": 0, "x": 0.5}\n{"step": 1, "x": 0.25}\n'


def test_a_broken_line_before_the_last_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is not a metrics record"):
        MetricsFile(path, last_step=2)


def test_floats_read_back_as_the_same_bits(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).integers(0, 2**64, size=2000, dtype=np.uint64)
    doubles = [x for x in bits.view(np.float64).tolist() if np.isfinite(x)]
    singles = np.random.default_rng(1).standard_normal(500).astype(np.float32).tolist()
    numbers = {f"x/{i}": x for i, x in enumerate([*doubles, *singles, -0.0, 5e-324, 0.1, 1e22])}
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, last_step=-1) as file:
        file.append(0, numbers)
    (record,) = read_metrics(path)
    for key, x in numbers.items():
        assert struct.pack("d", record[key]) == struct.pack("d", x)


def test_nan_is_refused(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl", last_step=-1) as file:
        with pytest.raises(ValueError, match="not JSON compliant"):
            file.append(0, {"x": float("nan")})
        file.append(0, {"x": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(tmp_path / "state.json", {"x": float("inf")})
    assert not (tmp_path / "state.json").exists()


def test_atomic_text_and_json(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"κ": [0.1, None, True]})
    assert read_json(path) == json.loads(path.read_bytes()) == {"κ": [0.1, None, True]}
    write_text_atomic(path, "new\n")
    assert path.read_text() == "new\n"
    assert os.listdir(tmp_path) == ["state.json"]


def test_machine_keys_are_what_two_equal_runs_may_differ_in() -> None:
    record = {
        "step": 3,
        "time/step_s": 1.0,
        "memory/peak_rss_gib": 2.0,
        "reward/mean": 0.5,
        "tokens/rollout": 9.0,
    }
    assert without_machine_keys(record) == {"step": 3, "reward/mean": 0.5, "tokens/rollout": 9.0}

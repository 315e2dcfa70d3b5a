"""The position table of a finished run, and the gate that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from comppo_mcore.cli import main
from comppo_mcore.credit.gate import PositionTable, position_gate
from comppo_mcore.errors import UserError
from comppo_mcore.trainer.gate_table import build_table, position_entries

LENGTHS = (40, 7, 1, 20)


def written_run(folder: Path, steps: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """A run folder with the gates of `steps` steps; returns (κ, mask) of each."""
    rng = np.random.default_rng(0)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    drawn, lines = [], [json.dumps({"step": 0, "eval/accuracy": 0.5})]
    for step in range(1, steps + 1):
        kappa, mask = rng.uniform(0.2, 0.8, sum(LENGTHS)).astype(np.float32), rng.random(sum(LENGTHS)) < 0.9
        entries = position_entries(torch.from_numpy(kappa), cu_seqlens, torch.from_numpy(mask))
        lines.append(json.dumps({"step": step, **entries}))
        drawn.append((kappa, mask))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return drawn


def expected_means(drawn: list[tuple[np.ndarray, np.ndarray]]) -> list[float | None]:
    bins: list[list[float]] = [[] for _ in range(20)]
    for kappa, mask in drawn:
        i = 0
        for length in LENGTHS:
            for t in range(length):
                if mask[i]:
                    bins[20 * t // length].append(float(kappa[i]))
                i += 1
    return [float(np.mean(values)) if values else None for values in bins]


def test_table_is_the_mean_gate_by_position(tmp_path: Path) -> None:
    expected = expected_means(written_run(tmp_path))
    table = build_table(tmp_path)
    for b, mean in enumerate(expected):
        assert (table.count[b] == 0) == (mean is None)
        if mean is not None:
            assert table.kappa[b] == pytest.approx(mean, abs=1e-12)


def test_the_command_writes_what_gate_mode_position_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written_run(tmp_path)
    assert main(["gate-table", str(tmp_path)]) == 0
    path = tmp_path / "gate_table.json"
    assert f"gate.table={path}" in capsys.readouterr().out
    table = PositionTable.from_json(path.read_text(), str(path))
    assert table == build_table(tmp_path)
    gate = position_gate(table, torch.tensor([0, 20, 23]))
    np.testing.assert_allclose(gate[:20].numpy(), np.float32(table.kappa))
    assert gate[20:].tolist() == pytest.approx([table.kappa[b] for b in (0, 6, 13)], abs=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "holds no metrics.jsonl"), (json.dumps({"step": 1, "reward/mean": 0.0}) + "\n", "has no gate")],
    ids=["no run", "no gate"],
)
def test_bad_input_folder(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        build_table(tmp_path)

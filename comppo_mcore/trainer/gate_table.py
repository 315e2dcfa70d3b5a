"""`comppo gate-table`: the frozen position schedule of a finished run, for gate.mode position (§6.4)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from comppo_mcore.credit.gate import POSITION_BINS, PositionTable, position_sums, position_table
from comppo_mcore.errors import UserError
from comppo_mcore.trainer.files import read_metrics, write_text_atomic

SUM_KEY, COUNT_KEY = "gate_position/sum_{:02d}", "gate_position/count_{:02d}"


def position_entries(kappa: Tensor, cu_seqlens: Tensor, mask: Tensor) -> dict[str, float]:
    """Σκ and the number of valid tokens in each bin of t/T, kept in every step's record for the table."""
    sums, counts = position_sums(kappa, cu_seqlens, mask).tolist()
    entries = {SUM_KEY.format(b): value for b, value in enumerate(sums)}
    return entries | {COUNT_KEY.format(b): value for b, value in enumerate(counts)}


def main(run_folder: Path, out: Path) -> None:
    """Average κ by position over every step of a run and write the table."""
    table = build_table(run_folder)
    write_text_atomic(out, table.to_json() + "\n")
    for i, (kappa, count) in enumerate(zip(table.kappa, table.count, strict=True)):
        print(f"t/T {i / len(table.kappa):.2f}  κ {kappa:.4f}  tokens {count}")
    print(f"wrote {out}; use it with gate.mode=position gate.table={out}", flush=True)


def build_table(run_folder: Path) -> PositionTable:
    """The table of mean κ in 20 bins of t/T, over all valid tokens of the run.

    Raises:
        UserError: the folder holds no run with an attention gate.
    """
    path = run_folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"run folder {run_folder} holds no metrics.jsonl: give the folder of a finished run")
    sums = torch.zeros(2, POSITION_BINS, dtype=torch.float64)
    for record in read_metrics(path):
        if SUM_KEY.format(0) in record:
            sums += torch.tensor(
                [[record[key.format(b)] for b in range(POSITION_BINS)] for key in (SUM_KEY, COUNT_KEY)],
                dtype=torch.float64,
            )
    if sums[1].sum() == 0:
        raise UserError(
            f"run folder {run_folder} has no gate in its metrics.jsonl: give a run of algo.name comppo with "
            "gate.mode attention"
        )
    return position_table(sums)

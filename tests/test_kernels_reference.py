"""What only the eager reference has: a bounded workspace, and the blocks that its rows are cut into."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comppo_mcore.kernels import blocks
from comppo_mcore.kernels.concentration import attention_statistics
from tests.attention_cases import SUMS, Case, run


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("window", [None, 300])
def test_workspace_bounds_every_buffer(window: int | None) -> None:
    """A 256 KiB workspace, a 4 MiB T × T: nothing grows beyond the workspace, and nothing else changes."""
    case = Case(lengths=(1000, 24), prompts=(1, 1), heads=2, groups=1, width=8, window=window, top_k=4)
    q, k = case.tensors()
    wide = run(attention_statistics, case, q, k)
    with LargestTensor() as largest:
        narrow = run(attention_statistics, case, q, k, max_bytes=256 << 10)
    assert largest.bytes <= 256 << 10
    for key in SUMS:
        torch.testing.assert_close(getattr(narrow[0], key), getattr(wide[0], key), rtol=1e-6, atol=1e-12)
    assert torch.equal(narrow[1].index, wide[1].index)


def test_blocks_hold_every_row_once() -> None:
    cu = torch.tensor([0, 200, 200, 203, 500])
    rows = torch.randperm(500, generator=torch.Generator().manual_seed(2))[:400]
    ranges = blocks.row_ranges(
        rows, cu, torch.ones(4, dtype=torch.int64), history="all", skip_first=0, window=90
    )
    seen = []
    for batch in blocks.row_batches(ranges, pair_bytes=64, key_bytes=64, max_bytes=1 << 20):
        for slots, first in zip(batch.slot, batch.first_key, strict=True):
            slots = slots[slots >= 0]
            seen += slots.tolist()
            assert len(set(ranges.sequence_start[slots].tolist())) == 1
            assert (ranges.visible_from[slots] >= first).all()
            assert (ranges.position[slots] < first + batch.num_keys).all()
    assert sorted(seen) == list(range(400))

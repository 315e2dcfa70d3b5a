"""The ratio over recorded supports (`algo.ratio: mask`), and what a shared engine asks of the ranks."""

from __future__ import annotations

import pytest
import torch

from comppo_mcore.model.batch import Sample, pack
from tests.dist import run_distributed

CPU = torch.device("cpu")


def test_two_ranks_wait_for_the_first_and_agree_on_supports() -> None:
    run_distributed("shared_engine.py", 2, timeout=60)


def test_supports_are_packed_beside_the_targets() -> None:
    samples = [Sample((5,), (1, 2), ((1, 9), (2, 3, 4))), Sample((6, 7), (8,), ((8,),))]
    batch = pack(samples, [1, 0], CPU, extra_row=True)
    assert batch.supports is not None
    assert batch.targets.tolist() == [8, 0, 1, 2, 0]
    assert batch.supports.tolist() == [[8, -1, -1], [0, -1, -1], [1, 9, -1], [2, 3, 4], [0, -1, -1]]


def test_supports_of_some_samples_only_are_an_error() -> None:
    assert pack([Sample((5,), (1,))], [0], CPU).supports is None
    with pytest.raises(ValueError, match="others have none"):
        pack([Sample((5,), (1,), ((1,),)), Sample((5,), (1,))], [0, 1], CPU)

"""Helpers on packed arrays, against hand-worked cases and per-response loops."""

from __future__ import annotations

import pytest
import torch

from comppo_mcore.credit import packed

CU = torch.tensor([0, 3, 3, 7, 8])
MASK = torch.tensor([True, False, True, False, True, True, False, False])


def test_positions_and_ids_restart_with_every_response() -> None:
    assert packed.lengths(CU).tolist() == [3, 0, 4, 1]
    assert packed.segment_ids(CU).tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert packed.positions(CU).tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert packed.tokens_to_end(CU).tolist() == [3, 2, 1, 4, 3, 2, 1, 1]


def test_sums_take_valid_tokens_only() -> None:
    x = torch.tensor([1.0, float("nan"), 2.0, float("inf"), 4.0, 8.0, float("nan"), 16.0])
    assert packed.segment_sum(x, CU, MASK).tolist() == [3.0, 0.0, 12.0, 0.0]
    assert packed.segment_count(CU, MASK).tolist() == [2, 0, 2, 0]
    mean = packed.segment_mean(x, CU, MASK)
    assert mean[[0, 2]].tolist() == [1.5, 6.0]
    assert mean[[1, 3]].isnan().all()


def test_chains_of_compact_and_cut() -> None:
    compact, runs = packed.chains(CU, MASK, "compact"), packed.chains(CU, MASK, "cut")
    assert compact.index.tolist() == runs.index.tolist() == [0, 2, 4, 5]
    assert compact.cu_seqlens.tolist() == [0, 2, 2, 4, 4]
    assert runs.cu_seqlens.tolist() == [0, 1, 2, 4]
    assert compact.scatter(torch.tensor([1.0, 2.0, 3.0, 4.0]), 8).tolist() == [1, 0, 2, 0, 3, 4, 0, 0]


def test_runs_end_where_a_response_ends() -> None:
    runs = packed.runs(torch.tensor([0, 2, 4]), torch.ones(4, dtype=torch.bool))
    assert runs.cu_seqlens.tolist() == [0, 2, 4]


def test_empty_packings() -> None:
    none = torch.zeros(0, dtype=torch.bool)
    for cu in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        num_responses = cu.numel() - 1
        packed.check(cu, none)
        assert packed.segment_ids(cu).numel() == 0
        assert packed.segment_sum(torch.zeros(0), cu, none).tolist() == [0.0] * num_responses
        assert packed.compact(cu, none).cu_seqlens.tolist() == [0] * (num_responses + 1)
        assert packed.runs(cu, none).cu_seqlens.tolist() == [0]


@pytest.mark.parametrize(
    ("cu_seqlens", "mask", "x", "named"),
    [
        (
            torch.tensor([0, 2], dtype=torch.int32),
            torch.ones(2, dtype=torch.bool),
            torch.zeros(2),
            "cu_seqlens",
        ),
        (torch.tensor([1, 2]), torch.ones(2, dtype=torch.bool), torch.zeros(2), "cu_seqlens"),
        (torch.tensor([0, 3, 2]), torch.ones(2, dtype=torch.bool), torch.zeros(2), "cu_seqlens"),
        (torch.tensor([0, 2]), torch.ones(2), torch.zeros(2), "mask"),
        (torch.tensor([0, 2]), torch.ones(3, dtype=torch.bool), torch.zeros(2), "mask"),
        (torch.tensor([0, 2]), torch.ones(2, dtype=torch.bool), torch.zeros(2, 1), "values"),
    ],
)
def test_check_names_what_does_not_fit(
    cu_seqlens: torch.Tensor, mask: torch.Tensor, x: torch.Tensor, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        packed.check(cu_seqlens, mask, values=x)


def test_unknown_gap_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="gaps"):
        packed.chains(CU, MASK, "skip")  # type: ignore[arg-type]

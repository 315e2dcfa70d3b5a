"""The gate map and its controls."""

from __future__ import annotations

import json

import pytest
import torch

from comppo_mcore.credit import gate
from comppo_mcore.credit.gate import POSITION_BINS, Envelope, PositionTable
from comppo_mcore.errors import UserError
from tests import oracle

PAPER = Envelope(0.1, 0.9, 4.0, 0.95)
CU = torch.tensor([0, 3, 3, 43, 44])


def test_gate_matches_eq_20_and_attains_the_strict_subinterval() -> None:
    c = torch.linspace(0, 1, 101)
    kappa = gate.attention_gate(c, PAPER)
    expected = torch.tensor([oracle.gate(float(x)) for x in c])
    torch.testing.assert_close(kappa, expected, rtol=0, atol=1e-7)
    assert (kappa.diff() > 0).all()
    assert kappa[0].item() == pytest.approx(0.1954, abs=5e-5)
    assert kappa[-1].item() == pytest.approx(PAPER.kappa_sup, abs=1e-7)
    assert kappa[50].item() == pytest.approx(0.5, abs=1e-7)


@pytest.mark.parametrize("ends", [(0.9, 0.1), (1.0, 1.0), (-0.1, 0.5), (0.5, 1.1)])
def test_envelopes_that_are_none_are_refused(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="kappa_lo"):
        Envelope(*ends, 4.0, 0.95)


def test_fixed_gate_is_one_constant() -> None:
    assert gate.fixed_gate(torch.rand(5), 0.61).tolist() == pytest.approx([0.61] * 5)


def test_shuffle_permutes_valid_gates_and_nothing_else() -> None:
    kappa, mask = torch.arange(10.0), torch.arange(10) % 3 != 0
    permutation = gate.global_permutation(int(mask.sum()), seed=7)
    shuffled = gate.shuffled_gate(kappa, mask, permutation)
    assert torch.equal(shuffled[~mask], kappa[~mask])
    assert not torch.equal(shuffled[mask], kappa[mask])
    assert sorted(shuffled[mask].tolist()) == kappa[mask].tolist()
    assert torch.equal(permutation, gate.global_permutation(6, seed=7))
    assert not torch.equal(permutation, gate.global_permutation(6, seed=8))


def test_shuffle_over_shards_is_the_shuffle_of_the_whole() -> None:
    kappa, mask = torch.rand(24), torch.rand(24) > 0.3
    permutation = gate.global_permutation(int(mask.sum()), seed=1)
    whole = gate.shuffled_gate(kappa, mask, permutation)
    pool, offset, parts = kappa[mask], 0, []
    for k, m in zip(kappa.split([5, 0, 19]), mask.split([5, 0, 19]), strict=True):
        parts.append(gate.shuffled_gate(k, m, permutation, pool=pool, offset=offset))
        offset += int(m.sum())
    assert torch.equal(torch.cat(parts), whole)


def test_shuffle_refuses_a_permutation_of_another_batch() -> None:
    with pytest.raises(ValueError, match="permutation"):
        gate.shuffled_gate(torch.rand(4), torch.ones(4, dtype=torch.bool), torch.arange(3))


def test_position_bins_are_equal_width_in_t_over_length() -> None:
    bins = gate.position_bins(CU).tolist()
    assert bins[:3] == [0, 6, 13]
    assert bins[3:43] == [t // 2 for t in range(40)]
    assert bins[43:] == [0]
    assert gate.position_bins(torch.tensor([0, 0])).tolist() == []


def test_position_table_holds_the_mean_gate_of_each_bin() -> None:
    generator = torch.Generator().manual_seed(0)
    kappa, mask = torch.rand(44, generator=generator), torch.rand(44, generator=generator) > 0.2
    kappa[~mask] = torch.nan
    table = gate.position_table(gate.position_sums(kappa, CU, mask) + gate.position_sums(kappa, CU, mask))
    members: list[list[float]] = [[] for _ in range(POSITION_BINS)]
    for start, length in ((0, 3), (3, 40), (43, 1)):
        for t in range(length):
            if mask[start + t]:
                members[POSITION_BINS * t // length].append(float(kappa[start + t]))
    assert table.count == tuple(2 * len(m) for m in members)
    for k, m in zip(table.kappa, members, strict=True):
        if m:
            assert k == pytest.approx(sum(m) / len(m))


def test_position_table_fills_empty_bins_from_the_nearest() -> None:
    kappa, cu = torch.tensor([0.2, 0.4]), torch.tensor([0, 2])  # bins 0 and 10
    table = gate.position_table(gate.position_sums(kappa, cu, torch.ones(2, dtype=torch.bool)))
    assert table.kappa == pytest.approx([0.2] * 6 + [0.4] * 14)  # bin 5 is as far from both: the earlier
    with pytest.raises(ValueError, match="no valid token"):
        gate.position_table(torch.zeros(2, POSITION_BINS, dtype=torch.float64))


def test_position_gate_depends_on_position_alone() -> None:
    table = PositionTable(tuple(i / 20 for i in range(20)), (1,) * 20)
    kappa = gate.position_gate(table, CU)
    assert kappa.dtype == torch.float32
    assert kappa.tolist() == pytest.approx([b / 20 for b in gate.position_bins(CU).tolist()])


def test_position_table_survives_json() -> None:
    table = PositionTable(tuple(0.1 + i / 30 for i in range(20)), tuple(range(20)))
    assert PositionTable.from_json(table.to_json(), "t.json") == table


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not a position table"),
        ("[1, 2]", "not a position table"),
        ('{"kappa": null, "count": []}', "not a position table"),
        (json.dumps({"kappa": [0.5] * 19, "count": [1] * 19}), "19 gates"),
        (json.dumps({"kappa": [0.5] * 19 + [1.5], "count": [1] * 20}), "in \\[0, 1\\]"),
        (json.dumps({"kappa": [0.5] * 19 + [float("nan")], "count": [1] * 20}), "in \\[0, 1\\]"),
    ],
)
def test_bad_input_position_table(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"gate\.table is t\.json.*{reason}"):
        PositionTable.from_json(text, "t.json")

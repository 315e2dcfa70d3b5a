"""Credit reach and calibrated envelopes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo_mcore.credit import gate, reach, transport
from comppo_mcore.credit.gate import Envelope
from comppo_mcore.errors import UserError


def batch(lengths: list[int], seed: int = 0, gap_share: float = 0.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return {
        "concentration": torch.rand(total, generator=generator),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "mask": torch.rand(total, generator=generator) >= gap_share,
    }


def median_log_weight(b: dict[str, torch.Tensor], envelope: Envelope, share: float) -> float:
    """The lower median over responses of log λⁿ∏κ over the last n = ⌈share · T⌉ valid tokens, by loops."""
    kappa = gate.attention_gate(b["concentration"].double(), envelope)
    weights = []
    for start, stop in zip(b["cu_seqlens"][:-1].tolist(), b["cu_seqlens"][1:].tolist(), strict=True):
        valid = [float(kappa[i]) for i in range(start, stop) if b["mask"][i]]
        if valid:
            n = math.ceil(share * len(valid) - 1e-9)
            weights.append(sum(math.log(envelope.lam * k) for k in valid[-n:]))
    return sorted(weights)[(len(weights) - 1) // 2]


def calibrate(b: dict[str, torch.Tensor], share: float, keep: Any = "lam", lam: float = 0.95) -> Envelope:
    return reach.calibrate(**b, reach=share, keep=keep, tau=4.0, lam=lam)


def test_reach_at_full_retention_is_134_tokens() -> None:
    """0.95¹³⁴ > 1e-3 > 0.95¹³⁵: the last token and the 134 before it."""
    kappa, cu, mask = torch.ones(1000), torch.tensor([0, 1000]), torch.ones(1000, dtype=torch.bool)
    weights = transport.trace_weights(kappa, cu, mask, 0.95)
    assert reach.credit_reach(weights, mask) == pytest.approx(135 / 1000)
    assert reach.credit_reach(transport.trace_weights(kappa, cu, mask, 1.0), mask) == 1.0


def test_reach_counts_valid_tokens_of_all_ranks() -> None:
    kappa, cu = torch.full((6,), 0.5), torch.tensor([0, 4, 6])
    mask = torch.tensor([True, False, True, True, True, True])
    weights = transport.trace_weights(kappa, cu, mask, 1e-3)  # only the last token of each is reached
    assert reach.credit_reach(weights, mask) == pytest.approx(2 / 5)
    other = torch.tensor([3.0, 5.0], dtype=torch.float64)
    assert reach.credit_reach(weights, mask, lambda sums: sums + other) == pytest.approx(5 / 10)
    assert math.isnan(reach.credit_reach(weights[:0], mask[:0]))
    edge = torch.tensor([1e-3, 1.001e-3], dtype=torch.float64)
    assert reach.credit_reach(edge, mask[2:4]) == 0.5  # the weight must exceed 1e-3


def test_share_of_advantage_beyond_reach() -> None:
    weights = torch.tensor([1e-4, 1e-3, 2e-3, 1.0, 0.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False])
    advantage = torch.tensor([1.0, -2.0, 3.0, -4.0, torch.nan])
    assert reach.share_beyond_reach(advantage, weights, mask) == pytest.approx(3 / 10)
    assert math.isnan(reach.share_beyond_reach(0 * weights, weights, mask))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    share=st.sampled_from([0.1, 0.5, 1.0]),
    gap_share=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_calibrated_envelope_is_the_widest_that_reaches(
    lengths: list[int], share: float, gap_share: float, seed: int
) -> None:
    b = batch(lengths, seed, gap_share)
    b["mask"][0] = True
    envelope = calibrate(b, share)
    w = 1 - envelope.kappa_hi
    assert envelope.kappa_lo == pytest.approx(1 - 9 * w, abs=1e-12)
    assert (envelope.tau, envelope.lam) == (4.0, 0.95)
    assert envelope.kappa_sup < 1
    assert median_log_weight(b, envelope, share) >= math.log(1e-3) - 1e-6
    if w < 1 / 9 - 1e-9:
        wider = Envelope(max(0.0, 1 - 9.009 * w), 1 - 1.001 * w, 4.0, 0.95)
        assert median_log_weight(b, wider, share) < math.log(1e-3)


def test_short_responses_keep_the_widest_envelope() -> None:
    envelope = calibrate(batch([2, 2, 3]), 1.0)
    assert envelope.kappa_lo == pytest.approx(0.0, abs=1e-12)
    assert envelope.kappa_hi == pytest.approx(8 / 9)


def test_calibration_raises_the_trace_reach() -> None:
    b = batch([100] * 9)
    paper = gate.attention_gate(b["concentration"], Envelope(0.1, 0.9, 4.0, 0.95))
    made = gate.attention_gate(b["concentration"], calibrate(b, 1.0))
    share = [
        reach.credit_reach(transport.trace_weights(k, b["cu_seqlens"], b["mask"], 0.95), b["mask"])
        for k in (paper, made)
    ]
    assert share[0] < 0.2
    assert share[1] > 0.95


@pytest.mark.parametrize("lengths", [[500] * 4, [200, 1000], [200, 300, 1000], [16384]])
def test_bad_input_infeasible_calibrate_names_the_largest_reach(lengths: list[int]) -> None:
    b = batch(lengths)
    with pytest.raises(UserError, match=r"gate\.calibrate\.reach is 1\.0.*transport\.lam 0\.95") as error:
        calibrate(b, 1.0)
    named = re.search(r"use at most (\S+),", str(error.value))
    assert named is not None
    largest = float(named[1])
    assert calibrate(b, largest).kappa_sup < 1
    with pytest.raises(UserError):
        calibrate(b, largest * 1.02)


def test_free_lambda_takes_the_smallest_that_allows_the_reach() -> None:
    assert calibrate(batch([100] * 3), 1.0, "free").lam == 0.95
    assert calibrate(batch([500] * 3), 1.0, "free").lam == 0.99
    assert calibrate(batch([1000] * 3), 1.0, "free").lam == 0.995
    assert calibrate(batch([16384]), 1.0, "free").lam == 1.0
    assert calibrate(batch([30] * 3), 1.0, "free", lam=0.9).lam == 0.9
    assert calibrate(batch([100] * 3), 1.0, "free", lam=0.9).lam == 0.95


def test_tail_is_not_lengthened_by_rounding() -> None:
    """0.07 · 100 is 7.000000000000001 in binary; the tail is 7 tokens all the same."""
    b = batch([100])
    b["concentration"][:93] = np.nan  # never read
    assert calibrate(b, 0.07).kappa_sup < 1


def test_calibrate_needs_a_valid_token() -> None:
    b = batch([3])
    b["mask"][:] = False
    with pytest.raises(ValueError, match="no valid token"):
        calibrate(b, 1.0)

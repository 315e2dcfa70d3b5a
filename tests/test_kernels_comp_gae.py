"""Comp-GAE, eager and compiled, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from comppo_mcore.credit import transport
from comppo_mcore.kernels import compiled, extension
from tests import oracle

NAMES = ("delta", "advantage", "lambda_return")


@pytest.fixture(autouse=True)
def ops() -> None:
    assert extension.load(), "the compiled ops are not installed"


def drawn(lengths: list[int], *, gap_share: float, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    return {
        "rewards": torch.randn(n, generator=generator, dtype=dtype),
        "values": torch.randn(n, generator=generator, dtype=dtype),
        "kappa": torch.rand(n, generator=generator, dtype=dtype),
        "cu_seqlens": torch.tensor([0, *np.cumsum(lengths)]),
        "mask": torch.rand(n, generator=generator) >= gap_share,
        "bootstrap_values": torch.randn(len(lengths), generator=generator, dtype=dtype),
    }


def by_the_book(x: dict[str, Any], lam: float, gaps: str) -> dict[str, np.ndarray]:
    out: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
    arrays = {k: x[k].double().numpy() for k in ("rewards", "values", "kappa")}
    cu = x["cu_seqlens"].tolist()
    for b, (start, end) in enumerate(pairwise(cu)):
        bootstrap = 0.0 if x["bootstrap_values"] is None else float(x["bootstrap_values"][b])
        parts = (arrays[k][start:end].tolist() for k in ("rewards", "values", "kappa"))
        mask = x["mask"][start:end].tolist()
        for name, part in zip(NAMES, oracle.comp_gae(*parts, mask, lam, gaps, bootstrap), strict=True):
            out[name].append(part)
    return {name: np.concatenate(parts) for name, parts in out.items()}


SHAPES = {
    "one": [1],
    "short": [1, 0, 2, 3, 0, 1],
    "even": [40] * 8,
    "ragged": [300, 1, 0, 77, 128, 129, 5],
    "empty": [0, 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bootstrap", [False, True], ids=["no_bootstrap", "bootstrap"])
@pytest.mark.parametrize("gaps", ["compact", "cut"])
@pytest.mark.parametrize("gap_share", [0.0, 0.3, 0.9, 1.1], ids=["dense", "gaps", "sparse", "all_gaps"])
@pytest.mark.parametrize("shape", SHAPES)
def test_comp_gae_matches_oracle(
    shape: str, gap_share: float, gaps: Any, bootstrap: bool, dtype: torch.dtype
) -> None:
    """At most twice the eager error plus 4 ulp, and exact zeros at gaps."""
    x = drawn(SHAPES[shape], gap_share=gap_share, dtype=dtype)
    if not bootstrap:
        x["bootstrap_values"] = None
    got, eager = (op(**x, lam=0.95, gaps=gaps) for op in (compiled.comp_gae, transport.comp_gae))
    ulp = torch.finfo(dtype).eps
    for name, want in by_the_book(x, 0.95, gaps).items():
        ours, torchs = getattr(got, name), getattr(eager, name)
        assert ours.dtype == dtype and not ours[~x["mask"]].any()
        error = np.abs(torchs.double().numpy() - want).max(initial=0)
        scale = np.abs(want).max(initial=0)
        assert np.abs(ours.double().numpy() - want).max(initial=0) <= 2 * error + 4 * ulp * scale


@pytest.mark.parametrize("gaps", ["compact", "cut"])
def test_entries_outside_the_mask_are_not_read(gaps: Any) -> None:
    """NaN in V and κ of gaps, and under `cut` in their rewards, reaches nothing."""
    x = drawn([50, 30], gap_share=0.4)
    want = compiled.comp_gae(**x, lam=0.9, gaps=gaps)
    for name in ("values", "kappa", *(["rewards"] if gaps == "cut" else [])):
        x[name] = torch.where(x["mask"], x[name], torch.nan)
    got = compiled.comp_gae(**x, lam=0.9, gaps=gaps)
    assert all(torch.equal(getattr(got, name), getattr(want, name)) for name in NAMES)


def test_nan_stays_in_its_response() -> None:
    x = drawn([20, 20], gap_share=0.0)
    clean = compiled.comp_gae(**x, lam=0.9)
    x["values"][12] = torch.nan
    got = compiled.comp_gae(**x, lam=0.9)
    assert got.advantage[:13].isnan().all() and torch.equal(got.advantage[13:], clean.advantage[13:])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_invariance_to_threads_and_packing_is_bitwise(threads: Callable[[int], None]) -> None:
    lengths = [300, 0, 17, 64, 1, 500]
    x = drawn(lengths, gap_share=0.2)
    whole = compiled.comp_gae(**x, lam=0.95)
    for count in (1, 2, 5):
        threads(count)
        again = compiled.comp_gae(**x, lam=0.95)
        assert all(torch.equal(getattr(again, name), getattr(whole, name)) for name in NAMES)
    cu = x["cu_seqlens"].tolist()
    for b, (start, end) in enumerate(pairwise(cu)):
        own: dict[str, Tensor] = {k: x[k][start:end] for k in ("rewards", "values", "kappa", "mask")}
        own |= {
            "cu_seqlens": torch.tensor([0, end - start]),
            "bootstrap_values": x["bootstrap_values"][b : b + 1],
        }
        alone = compiled.comp_gae(**own, lam=0.95)
        assert all(torch.equal(getattr(alone, name), getattr(whole, name)[start:end]) for name in NAMES)


def test_results_carry_no_gradient() -> None:
    x = drawn([5], gap_share=0.0)
    x["values"].requires_grad_()
    assert not compiled.comp_gae(**x, lam=0.9).advantage.requires_grad

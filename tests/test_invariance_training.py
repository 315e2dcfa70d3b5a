"""A training step gives the same numbers in one process and under every layout and packing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from comppo_mcore.config.schema import ParallelConfig
from comppo_mcore.model import parallel
from tests import oracle_step
from tests.agreement import GRADIENT, PER_TOKEN, broken, by_role, joined, largest, missing, rounding, same_top
from tests.dist import run_distributed
from tests.hf_folders import VOCAB
from tests.invariance import (
    CLIP,
    GAPS,
    LR,
    SIZES,
    VARIANTS,
    Case,
    Finding,
    TopHistory,
    configuration,
    evidence,
    run,
    trajectories,
    write_folders,
)

ORACLE = 1e-4  # float32 against float64
BF16 = 0.1  # of the norm of a role's change: 8 bits of mantissa, rounded at other places in other layouts
PROCESSES = {"one": 1, "tp2": 2, "tp2_sp": 2, "pp2": 2, "dp2": 2, "tp2_pp2": 4}
EVERYWHERE = (("comppo", "wide"), ("comppo", "narrow"), ("clipped", "wide"))
FP32_CASES = [Case(layout, *run_as) for layout in PROCESSES for run_as in EVERYWHERE] + [
    *(Case(layout, "grpo", "narrow") for layout in ("one", "dp2", "tp2_pp2")),
    *(Case(layout, "ppo", "wide") for layout in ("tp2", "tp2_sp", "dp2")),
    *(Case(layout, "shuffled", "narrow") for layout in ("one", "tp2", "tp2_sp", "dp2", "tp2_pp2")),
]
BF16_CASES = [Case(layout, "clipped_bf16", "wide") for layout in PROCESSES]
FAULTY_CASES = [
    Case("dp2", "comppo", "wide", "critic_dp"),
    Case("dp2", "comppo", "wide", "shard_whitening"),
    Case("tp2", "comppo", "wide", "square_first"),
    Case("one", "comppo", "wide", "square_first"),
]
ALL_CASES = [*FP32_CASES, *BF16_CASES, *FAULTY_CASES]

Found = Callable[[Case], list[Finding]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_folders(folder)
    return folder


@pytest.fixture(scope="module")
def found(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """The findings of all ranks in a case; all cases of as many processes run in one launch."""
    parallel.initialize(ParallelConfig(), seed=0)

    @functools.cache
    def alone(case: Case) -> list[Finding]:
        return [run(case, root)]

    @functools.cache
    def launched(processes: int) -> list[dict[str, Finding]]:
        out = tmp_path_factory.mktemp("findings")
        cases = [case for case in ALL_CASES if PROCESSES[case.layout] == processes]
        run_distributed("invariance.py", processes, [root, out, *cases])
        return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(processes)]

    def find(case: Case) -> list[Finding]:
        processes = PROCESSES[case.layout]
        return alone(case) if processes == 1 else [rank[str(case)] for rank in launched(processes)]

    yield find
    parallel.shutdown()


def reference(found: Found, variant: str) -> Finding:
    (finding,) = found(Case("one", variant, "wide"))
    return finding


# ---------------------------------------------------------------------------- every layout, every packing


@pytest.mark.parametrize("case", FP32_CASES, ids=str)
def test_a_step_is_that_of_one_process(found: Found, case: Case) -> None:
    one, findings = reference(found, case.variant), found(case)
    assert broken(one, findings) == {}
    assert missing(one, findings) == set()


@pytest.mark.parametrize("case", BF16_CASES, ids=str)
def test_a_clipped_step_in_bf16_is_that_of_one_process(found: Found, case: Case) -> None:
    findings = found(case)
    change = by_role(joined(f.change() for f in findings))
    for role, expected in by_role(reference(found, case.variant).change()).items():
        assert (change[role] - expected).norm() <= BF16 * expected.norm(), role
        assert min(step[f"{role}_grad_norm"] for f in findings for step in f.steps) > CLIP


@pytest.mark.parametrize("case", [*FP32_CASES, *BF16_CASES], ids=str)
def test_norms_and_clips_are_those_of_the_whole_gradient(found: Found, case: Case) -> None:
    """The first step is −lr · min(1, clip / ‖g‖) · g by role, with g from all shards, each entry once."""
    findings = found(case)
    gradient = joined(f.gradients for f in findings)
    norms = {role: float(g.norm()) for role, g in by_role(gradient).items()}
    clip = CLIP if case.variant.startswith("clipped") else float("inf")
    for finding in findings:
        for role, norm in norms.items():
            assert abs(finding.steps[0][f"{role}_grad_norm"] - norm) <= GRADIENT * norm
        for name, change in finding.change(first=True).items():
            factor = min(1.0, clip / norms["critic" if name.startswith("critic.") else "actor"])
            expected = -LR * factor * gradient[name]
            allowed = GRADIENT * largest(expected) + rounding(finding.weights[0][name], 1)
            assert largest(change - expected) <= allowed, name


# ---------------------------------------------------------------------------- against float64


def distance_to_oracle(finding: Finding, root: Path) -> dict[str, float]:
    config = configuration(Case("one", "comppo", "wide"), root)
    critic = {n.removeprefix("critic."): w for n, w in finding.weights[0].items() if n.startswith("critic.")}
    tokens, top = oracle_step.step(root / "policy", critic, trajectories(), evidence(), config)
    distance = {
        name: max(float(np.abs(finding.tokens[name][i].numpy() - x).max()) for i, x in arrays.items())
        for name, arrays in tokens.items()
    }
    equal = [
        same_top(finding.top[key], TopHistory(torch.tensor(index), torch.zeros(len(index))))
        for key, index in top.items()
    ]
    return distance | {"top-K": float(equal.count(False))}


def test_one_process_agrees_with_the_float64_oracle(found: Found, root: Path) -> None:
    distance = distance_to_oracle(reference(found, "comppo"), root)
    assert distance.keys() == {"logprob", "kappa", "value", "advantage", "lambda_return", "credit", "top-K"}
    assert {name: d for name, d in distance.items() if d > ORACLE} == {}


# ---------------------------------------------------------------------------- the checks see what is wrong


def test_critic_gradient_left_unreduced_is_seen(found: Found) -> None:
    one = reference(found, "comppo")
    wrong = broken(one, found(Case("dp2", "comppo", "wide", "critic_dp")))
    critic = {name for name in one.gradients if name.startswith("critic.")}
    gradients = {name.removeprefix("gradient ") for name in wrong if name.startswith("gradient ")}
    assert gradients == critic
    assert {"critic_grad_norm"} | {f"delta {name}" for name in critic} <= wrong.keys()
    assert not wrong.keys() & {"value", "credit", "actor_grad_norm"}


def test_whitening_per_shard_is_seen(found: Found) -> None:
    wrong = broken(reference(found, "comppo"), found(Case("dp2", "comppo", "wide", "shard_whitening")))
    assert {"credit", "policy_loss", "actor_grad_norm", "gradient model.norm.weight"} <= wrong.keys()
    assert not wrong.keys() & {"logprob", "kappa", "value", "advantage", "gradient critic.w1_local"}


@pytest.mark.parametrize("layout", ["one", "tp2"])
def test_mean_over_heads_after_the_square_is_seen(found: Found, layout: str) -> None:
    wrong = broken(reference(found, "comppo"), found(Case(layout, "comppo", "wide", "square_first")))
    assert {"kappa", "value", "advantage", "credit", "policy_loss", "value_loss"} <= wrong.keys()
    assert not wrong.keys() & {"logprob", "top-K"}


def test_mean_over_heads_after_the_square_is_seen_by_the_oracle(found: Found, root: Path) -> None:
    (finding,) = found(Case("one", "comppo", "wide", "square_first"))
    distance = distance_to_oracle(finding, root)
    assert {name for name, d in distance.items() if d > ORACLE} >= {"kappa", "value", "credit"}


def test_top_k_may_differ_at_a_tie_only() -> None:
    def top(index: list[int], weight: list[float]) -> TopHistory:
        return TopHistory(torch.tensor(index), torch.tensor(weight))

    one = top([4, 2, 7], [0.5, 0.25, 0.125])
    assert same_top(one, top([2, 4, 7], [0.25, 0.5, 0.125]))
    assert same_top(one, top([4, 2, 6], [0.5, 0.25, 0.125 * (1 + 5e-7)]))
    assert not same_top(one, top([4, 2, 6], [0.5, 0.25, 0.125 * (1 - 1e-5)]))
    assert not same_top(one, top([4, 6, 7], [0.5, 0.125, 0.125]))
    assert not same_top(one, top([4, 2, -1], [0.5, 0.25, 0.0]))


def test_the_problem_asks_the_questions(found: Found) -> None:
    """V ≠ 0 everywhere, K binds on some rows only, the vocabulary needs padding, clips bind where asked."""
    one = reference(found, "comppo")
    value = torch.cat(list(one.tokens["value"].values()))
    assert value.abs().min() > PER_TOKEN and (value.abs() < 1).float().mean() > 0.9
    filled = {int((top.index >= 0).sum()) for top in one.top.values()}
    assert filled == set(range(1, 9))
    assert sum(int((top.index >= 0).sum()) == 8 for top in one.top.values()) > 50
    assert torch.cat(list(one.tokens["kappa"].values())).std() > 0.05
    assert VOCAB % 2 == 1 and any(response == 1 for _, response in SIZES) and GAPS
    assert all(float(one.weights[0][f"critic.{name}"].abs().min()) > 0 for name in ("w2_local", "b2_routed"))
    for variant in VARIANTS:
        for step in reference(found, variant).steps:
            norms = [n for role in ("actor", "critic") if (n := step[f"{role}_grad_norm"]) is not None]
            assert min(norms) > 0
            assert not variant.startswith("clipped") or min(norms) > CLIP

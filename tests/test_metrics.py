"""Every entry of a step's record against float64 numpy loops written here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from comppo_mcore.credit.controller import ControllerState, Knobs
from comppo_mcore.trainer.metrics import (
    MinibatchSums,
    UpdateStats,
    controller_metrics,
    explained_variance,
    gate_drift,
    reach_warning,
    spearman,
    step_metrics,
)
from comppo_mcore.trainer.records import TokenTable

GROUP, LAM = 4, 0.95
CRITIC_ARRAYS = ("kappa", "value", "lambda_return", "dead", "saturated")


def _table(
    seed: int = 0, lengths: tuple[int, ...] = (40, 1, 2, 7, 90, 33, 12, 60), **changes: Any
) -> TokenTable:
    """Eight responses of two prompts with gaps, one of them a gap entirely; ties among values."""
    rng = np.random.default_rng(seed)
    n, b = sum(lengths), len(lengths)
    mask = rng.uniform(size=n) > 0.15
    mask[lengths[0]] = True  # the one-token response
    mask[lengths[0] + 1 : lengths[0] + 3] = False  # no valid token at all

    def floats(size: int, low: float, high: float) -> torch.Tensor:
        return torch.tensor(rng.uniform(low, high, size=size), dtype=torch.float32)

    def flags(size: int) -> torch.Tensor:
        return torch.tensor(rng.uniform(size=size) > 0.5)

    arrays: dict[str, Any] = {
        "cu_seqlens": torch.tensor(np.concatenate([[0], np.cumsum(lengths)])),
        "mask": torch.tensor(mask),
        "fresh": torch.tensor(rng.uniform(size=n) > 0.3),
        "logprob": floats(n, -3, 0),
        "ref_logprob": floats(n, -3, 0),
        "engine_logprob": floats(n, -3, 0),
        "entropy": floats(n, 0, 4),
        "advantage": floats(n, -1, 1),
        "credit": floats(n, -5, 5),
        "kappa": floats(n, 0.6, 0.99),
        "value": (floats(n, -1, 1) * 4).round() / 4,
        "lambda_return": (floats(n, -1, 1) * 8).round() / 8,
        "dead": flags(n),
        "saturated": flags(n),
        "reward": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.25, -0.5, 0.0, 1.0]),
        "reward_accuracy": floats(b, 0, 1),
        "reward_format": floats(b, -1, 0),
        "reward_length": floats(b, -1, 0),
        "correct": torch.tensor([True, True, True, True, False, False, False, True]),
        "formatted": flags(b),
        "truncated": flags(b),
        "timed_out": flags(b),
    }
    return TokenTable(**(arrays | changes))


def _measure(table: TokenTable) -> dict[str, float]:
    return step_metrics(table, group_size=GROUP, lam=LAM, gaps="compact")


def _valid_by_response(table: TokenTable) -> list[list[int]]:
    cu, mask = table.cu_seqlens.tolist(), table.mask.tolist()
    return [[i for i in range(cu[b], cu[b + 1]) if mask[i]] for b in range(len(cu) - 1)]


def _column(table: TokenTable, name: str) -> np.ndarray:
    return getattr(table, name).numpy().astype(np.float64)


def _check(metrics: dict[str, float], expected: dict[str, float]) -> None:
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_gate_entries() -> None:
    table = _table()
    kappa, correct = _column(table, "kappa"), table.correct.tolist()
    thirds: list[list[float]] = [[], [], []]
    by_outcome: dict[bool, list[float]] = {True: [], False: []}
    for b, valid in enumerate(_valid_by_response(table)):
        for j, i in enumerate(valid):
            thirds[math.floor(3 * j / len(valid))].append(kappa[i])
            by_outcome[correct[b]].append(kappa[i])
    everything = sorted(by_outcome[True] + by_outcome[False])

    def quantile(q: float) -> float:
        place = q * (len(everything) - 1)
        low = math.floor(place)
        high = min(low + 1, len(everything) - 1)
        return everything[low] + (place - low) * (everything[high] - everything[low])

    _check(
        _measure(table),
        {
            "gate/kappa_mean": sum(everything) / len(everything),
            "gate/kappa_median": quantile(0.5),
            "gate/kappa_iqr": quantile(0.75) - quantile(0.25),
            "gate/kappa_q05": quantile(0.05),
            "gate/kappa_q25": quantile(0.25),
            "gate/kappa_q75": quantile(0.75),
            "gate/kappa_q95": quantile(0.95),
            "gate/kappa_third_1": sum(thirds[0]) / len(thirds[0]),
            "gate/kappa_third_2": sum(thirds[1]) / len(thirds[1]),
            "gate/kappa_third_3": sum(thirds[2]) / len(thirds[2]),
            "gate/kappa_correct": sum(by_outcome[True]) / len(by_outcome[True]),
            "gate/kappa_incorrect": sum(by_outcome[False]) / len(by_outcome[False]),
        },
    )


def test_credit_entries() -> None:
    table = _table()
    kappa, credit, advantage = (_column(table, name) for name in ("kappa", "credit", "advantage"))
    reached = {LAM: 0, 1.0: 0}
    total = beyond = 0.0
    tokens = [i for valid in _valid_by_response(table) for i in valid]
    for valid in _valid_by_response(table):
        for j, i in enumerate(valid):
            for lam in reached:
                weight = 1.0
                for step in valid[j:-1]:
                    weight *= lam * kappa[step]
                reached[lam] += weight > 1e-3
                if lam == LAM:
                    total += abs(credit[i])
                    beyond += abs(credit[i]) if weight <= 1e-3 else 0.0
    a = advantage[tokens]
    mean = sum(a) / len(a)
    assert 0 < beyond < total, "the table must have tokens on both sides"
    _check(
        _measure(table),
        {
            "credit/trace_reach": reached[LAM] / len(tokens),
            "credit/value_reach": reached[1.0] / len(tokens),
            "credit/beyond_reach": beyond / total,
            "credit/advantage_mean": mean,
            "credit/advantage_std": math.sqrt(sum((x - mean) ** 2 for x in a) / len(a)),
            "credit/abs_mean": total / len(tokens),
            "credit/abs_max": max(abs(credit[i]) for i in tokens),
        },
    )


def _oracle_spearman(x: list[float], y: list[float]) -> float:
    def ranks(z: list[float]) -> list[float]:
        return [sum(w < v for w in z) + (sum(w == v for w in z) + 1) / 2 for v in z]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def test_critic_entries() -> None:
    table = _table()
    tokens = [i for valid in _valid_by_response(table) for i in valid]
    value, target = _column(table, "value")[tokens], _column(table, "lambda_return")[tokens]
    error = target - value
    n = len(tokens)
    variance = sum((x - sum(target) / n) ** 2 for x in target) / n
    residual = sum((x - sum(error) / n) ** 2 for x in error) / n
    _check(
        _measure(table),
        {
            "critic/explained_variance": 1 - residual / variance,
            "critic/spearman": _oracle_spearman(value.tolist(), target.tolist()),
            "critic/mae": sum(abs(x) for x in error) / n,
            "critic/saturation": sum(table.saturated.tolist()[i] for i in tokens) / n,  # type: ignore[union-attr]
            "critic/dead_rows": sum(table.dead.tolist()[i] for i in tokens) / n,  # type: ignore[union-attr]
            "critic/value_mean": sum(value) / n,
            "critic/return_mean": sum(target) / n,
        },
    )


def test_policy_entries() -> None:
    table = _table()
    tokens = [i for valid in _valid_by_response(table) for i in valid]
    logprob, ref, engine = (_column(table, f"{name}logprob") for name in ("", "ref_", "engine_"))
    entropy = _column(table, "entropy")
    k3 = [math.exp(ref[i] - logprob[i]) - 1 - (ref[i] - logprob[i]) for i in tokens]
    metrics = _measure(table)
    _check(
        metrics,
        {"policy/entropy": sum(entropy[i] for i in tokens) / len(tokens), "kl/reference": sum(k3) / len(k3)},
    )
    fresh = table.fresh.tolist()
    gap = [abs(engine[i] - logprob[i]) for i in tokens if fresh[i]]
    assert metrics["gap/mean"] == pytest.approx(sum(gap) / len(gap), rel=1e-6)  # differences in float32
    assert metrics["gap/max"] == pytest.approx(max(gap), rel=1e-6)
    stale = [abs(engine[i] - logprob[i]) for i in tokens if not fresh[i]]
    assert metrics["gap/stale_mean"] == pytest.approx(sum(stale) / len(stale), rel=1e-6)
    assert (metrics["gap/tokens"], metrics["rollout/stale"]) == (len(gap), len(stale) / len(tokens))


def test_reward_response_and_group_entries() -> None:
    table = _table()
    lengths = [len(valid) for valid in _valid_by_response(table)]
    reward = table.reward.tolist()
    right = [length for length, correct in zip(lengths, table.correct.tolist(), strict=True) if correct]
    wrong = [length for length, correct in zip(lengths, table.correct.tolist(), strict=True) if not correct]
    _check(
        _measure(table),
        {
            "reward/mean": sum(reward) / 8,
            "reward/std": math.sqrt(sum((r - sum(reward) / 8) ** 2 for r in reward) / 8),
            "reward/accuracy_part": _column(table, "reward_accuracy").sum() / 8,
            "reward/format_part": _column(table, "reward_format").sum() / 8,
            "reward/length_part": _column(table, "reward_length").sum() / 8,
            "reward/correct": 5 / 8,
            "reward/formatted": sum(table.formatted.tolist()) / 8,
            "reward/timed_out": sum(table.timed_out.tolist()) / 8,
            "response/length_mean": sum(lengths) / 8,
            "response/length_max": max(lengths),
            "response/length_correct": sum(right) / len(right),
            "response/length_incorrect": sum(wrong) / len(wrong),
            "response/truncated": sum(table.truncated.tolist()) / 8,
            "response/tokens": sum(lengths),
            "group/zero_variance": 0.5,
            "group/all_correct": 0.5,
            "group/none_correct": 0.0,
        },
    )


def test_nothing_outside_the_mask_is_read() -> None:
    table = _table()
    spoiled = {}
    for name in (
        "logprob",
        "ref_logprob",
        "engine_logprob",
        "entropy",
        "advantage",
        "credit",
        "kappa",
        "value",
    ):
        spoiled[name] = torch.where(table.mask, getattr(table, name), torch.nan)
    spoiled["lambda_return"] = torch.where(table.mask, _table().lambda_return, torch.nan)  # type: ignore[arg-type]
    assert _measure(replace(table, **spoiled)) == _measure(table)


def test_undefined_entries_are_absent() -> None:
    everything = set(_measure(_table()))
    all_correct = _measure(_table(correct=torch.ones(8, dtype=torch.bool)))
    assert everything - set(all_correct) == {"gate/kappa_incorrect", "response/length_incorrect"}
    n = 245
    constant = _measure(_table(lambda_return=torch.full((n,), 0.1)))
    assert everything - set(constant) == {"critic/explained_variance", "critic/spearman"}
    constant = _measure(_table(value=torch.zeros(n)))
    assert everything - set(constant) == {"critic/spearman"}
    no_credit = _measure(_table(credit=torch.zeros(n)))
    assert everything - set(no_credit) == {"credit/beyond_reach"}
    assert everything - set(_measure(_table(ref_logprob=None))) == {"kl/reference"}


def test_critic_free_algorithms_have_no_gate_reach_or_critic() -> None:
    everything = _measure(_table())
    without = _measure(_table(**dict.fromkeys(CRITIC_ARRAYS)))
    gone = set(everything) - set(without)
    assert {key.split("/")[0] for key in gone} == {"gate", "critic", "credit"}
    assert {key for key in gone if key.startswith("credit/")} == {
        "credit/trace_reach",
        "credit/value_reach",
        "credit/beyond_reach",
    }
    assert without == {key: everything[key] for key in without}


def test_a_bad_step_still_has_a_record_without_nan() -> None:
    nan = torch.full((245,), torch.nan)
    metrics = _measure(_table(value=nan, lambda_return=nan, logprob=nan, advantage=nan, credit=nan))
    json.dumps(metrics, allow_nan=False)
    assert not {"critic/mae", "critic/spearman", "critic/explained_variance", "gap/mean"} & set(metrics)
    assert {"gate/kappa_mean", "reward/mean", "policy/entropy", "critic/saturation"} <= set(metrics)


def test_a_step_without_any_valid_token_still_has_rewards() -> None:
    metrics = _measure(_table(mask=torch.zeros(245, dtype=torch.bool)))
    assert {key.split("/")[0] for key in metrics} == {"reward", "response", "group"}
    assert metrics["response/length_mean"] == 0


def test_all_values_are_python_floats() -> None:
    assert {type(value) for value in _measure(_table()).values()} == {float}


def test_groups_of_one_have_no_variance_and_uneven_groups_are_refused() -> None:
    metrics = step_metrics(_table(), group_size=1, lam=LAM, gaps="compact")
    assert not [key for key in metrics if key.startswith("group/")]
    with pytest.raises(ValueError, match="group size 3 does not divide 8"):
        step_metrics(_table(), group_size=3, lam=LAM, gaps="compact")


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_spearman_takes_average_ranks_of_ties(levels: int) -> None:
    rng = np.random.default_rng(levels)
    x = rng.integers(levels, size=60).astype(float)
    y = x + rng.integers(levels, size=60)
    measured = spearman(torch.tensor(x), torch.tensor(y))
    assert measured == pytest.approx(_oracle_spearman(x.tolist(), y.tolist()), abs=1e-12)


def test_spearman_sees_order_alone() -> None:
    x = torch.linspace(-3, 3, 50, dtype=torch.float64)
    assert spearman(x, x.exp()) == pytest.approx(1.0)
    assert spearman(x, -x.exp()) == pytest.approx(-1.0)
    assert spearman(x, torch.zeros(50)) is None
    assert spearman(x[:0], x[:0]) is None


def test_explained_variance_at_its_landmarks() -> None:
    target = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    assert explained_variance(target, target) == 1.0
    assert explained_variance(target + 5, target) == pytest.approx(1.0), "an offset is not variance"
    assert explained_variance(torch.full_like(target, 0.5), target) == pytest.approx(0.0)
    assert explained_variance(-target, target) == pytest.approx(-3.0)
    assert explained_variance(target, torch.ones(3)) is None


def test_reach_warning_below_a_tenth() -> None:
    assert reach_warning({"credit/trace_reach": 0.1}) is None
    assert reach_warning({}) is None
    text = reach_warning({"credit/trace_reach": 0.042, "credit/beyond_reach": 0.9})
    assert text is not None
    assert text.startswith("credit/trace_reach is 0.042: the last reward arrives at 4.2% of the tokens")
    assert "90% of |Â|" in text
    assert "gate.calibrate" in text


def test_gate_drift() -> None:
    old, new = torch.tensor([0.5, 0.6, 0.7]), torch.tensor([0.5, 0.8, torch.nan])
    mask = torch.tensor([True, True, False])
    metrics = gate_drift(old, new, mask)
    assert metrics["gate/drift_mean"] == pytest.approx(0.1)
    assert metrics["gate/drift_max"] == pytest.approx(0.2)
    assert gate_drift(old, new, torch.zeros(3, dtype=torch.bool)) == {}


def test_controller_entries() -> None:
    metrics = controller_metrics(ControllerState(phase=2, requested=3), Knobs(kl=2.25, actor_lr=0.5))
    assert metrics["controller/phase"] == 2.0
    assert metrics["controller/requested"] == 3.0
    assert metrics["controller/kl"] == 2.25
    assert metrics["controller/actor_lr"] == 0.5
    assert "controller/epochs" not in metrics, "no cap on the epochs"
    assert controller_metrics(ControllerState(), Knobs(epochs=1))["controller/epochs"] == 1.0


def _sums(**changes: Any) -> MinibatchSums:
    fields: dict[str, Any] = {
        "tokens": 10.0,
        "ratio": 11.0,
        "ratio_max": 1.5,
        "clipped": 2.0,
        "approx_kl": 0.5,
        "kl_loss": 3.0,
        "policy_loss": -0.25,
        "value_loss": 0.5,
        "actor_grad_norm": 1.0,
        "critic_grad_norm": 4.0,
        "applied": True,
    }
    return MinibatchSums(**(fields | changes))


def test_update_means_count_every_applied_minibatch_once() -> None:
    big = _sums(tokens=1000.0, ratio=900.0, ratio_max=3.0, clipped=500.0, approx_kl=100.0, kl_loss=200.0)
    big = replace(big, policy_loss=0.75, value_loss=1.5, actor_grad_norm=2.0, critic_grad_norm=8.0)
    bad = _sums(
        ratio=math.nan, ratio_max=math.inf, policy_loss=math.nan, actor_grad_norm=math.nan, applied=False
    )
    assert UpdateStats.merge([_sums(), bad, big]).metrics() == pytest.approx(
        {
            "policy/ratio_mean": (1.1 + 0.9) / 2,
            "policy/ratio_max": 3.0,
            "policy/clip_fraction": (0.2 + 0.5) / 2,
            "kl/behavior": (0.05 + 0.1) / 2,
            "kl/loss": (0.3 + 0.2) / 2,
            "loss/policy": 0.25,
            "loss/value": 1.0,
            "grad/actor": 1.5,
            "grad/actor_max": 2.0,
            "grad/critic": 6.0,
            "grad/critic_max": 8.0,
            "optimizer/applied": 2.0,
            "optimizer/skipped": 1.0,
        }
    )


def test_update_entries_that_do_not_exist_are_absent() -> None:
    warm_up = UpdateStats.merge([_sums(actor_grad_norm=None, policy_loss=None, kl_loss=None)] * 2).metrics()
    assert not {"grad/actor", "grad/actor_max", "loss/policy", "kl/loss"} & set(warm_up)
    assert warm_up["grad/critic"] == 4.0
    empty = UpdateStats.merge([_sums(tokens=0.0, ratio=0.0, ratio_max=0.0, clipped=0.0)]).metrics()
    assert "policy/ratio_mean" not in empty
    assert empty["optimizer/applied"] == 1.0
    assert UpdateStats.merge([_sums(applied=False)]).metrics() == {
        "optimizer/applied": 0.0,
        "optimizer/skipped": 1.0,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mask": torch.ones(244, dtype=torch.bool)},
            r"mask is torch.bool \[244\] on cpu, not torch.bool \[245\]",
        ),
        ({"entropy": torch.ones(245, dtype=torch.float64)}, "entropy is torch.float64"),
        ({"reward": torch.ones(7)}, r"reward is torch.float32 \[7\]"),
        ({"correct": torch.ones(8)}, "correct is torch.float32"),
        ({"logprob": None}, "logprob is missing"),
        ({"kappa": None}, "together or not at all"),
        ({"cu_seqlens": torch.tensor([0, 5, 3])}, "never fall"),
        ({"cu_seqlens": torch.tensor([0])}, "B ≥ 1"),
    ],
)
def test_a_table_that_does_not_fit_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _table(**changes)

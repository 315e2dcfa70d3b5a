"""What the three ops compute, in float64 numpy. Imports nothing of the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

Arrays = dict[str, np.ndarray]


def comp_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    kappa: np.ndarray,
    mask: np.ndarray,
    cu_seqlens: np.ndarray,
    *,
    lam: float,
    gaps: str,
    bootstrap: np.ndarray | None = None,
) -> Arrays:
    """Eq. 10, 11 and 28, token by token from the end."""
    out = {name: np.zeros(len(rewards)) for name in ("delta", "advantage", "lambda_return")}
    for b in range(len(cu_seqlens) - 1):
        tokens = range(cu_seqlens[b], cu_seqlens[b + 1])
        reward = {t: float(rewards[t]) for t in tokens if mask[t]}
        if gaps == "compact":
            _move_rewards(reward, rewards, tokens)
        next_value = 0.0 if bootstrap is None else float(bootstrap[b])
        next_advantage = 0.0
        for t in reversed(tokens):
            if not mask[t]:
                if gaps == "cut":
                    next_value = next_advantage = 0.0
                continue
            delta = reward[t] + float(kappa[t]) * next_value - float(values[t])
            next_advantage = delta + lam * float(kappa[t]) * next_advantage
            next_value = float(values[t])
            out["delta"][t], out["advantage"][t] = delta, next_advantage
            out["lambda_return"][t] = next_advantage + next_value
    return out


def _move_rewards(reward: dict[int, float], rewards: np.ndarray, tokens: range) -> None:
    """Adds the rewards of gaps to the last valid token before them, or to the first valid one."""
    for t in tokens:
        if t in reward or not reward:
            continue
        before = [u for u in reward if u < t]
        reward[max(before) if before else min(reward)] += float(rewards[t])


def pool_history(x: Arrays, *, epsilon: float = 1e-8, grads: Arrays | None = None) -> Arrays:
    """Eq. 22–26 edge by edge; with `grads` of both results, their derivatives too."""
    x = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in x.items()}
    d = x["query_beta"].shape[1]
    root, num_rows = math.sqrt(d), len(x["index"])
    out = {
        "pooled": np.zeros((num_rows, x["key_features"].shape[1] - 2 * d)),
        "score_sum": np.zeros(num_rows),
    }
    if grads is not None:
        out |= {f"grad_{n}": np.zeros_like(x[n]) for n in ("query_beta", "query_rel", "key_features")}
    for t in range(num_rows):
        q_beta, q_rel = x["query_beta"][t], x["query_rel"][t]
        edges = []
        for i, a in zip(x["index"][t], x["weight"][t], strict=True):
            if i < 0:
                continue
            at = x["seq_start"][t] + i
            key = x["key_features"][at]
            gate = 1 / (1 + math.exp(-float(q_beta @ key[:d]) / root))
            relevance = float(q_rel @ key[d : 2 * d]) / root
            edges.append((at, key, float(a), gate, relevance, float(a) * gate * max(relevance, 0.0)))
        total = math.fsum(e[5] for e in edges)
        for _, key, *_, score in edges:
            out["pooled"][t] += score / (total + epsilon) * key[2 * d :]
        out["score_sum"][t] = total
        if grads is None:
            continue
        grad = grads["pooled"][t].astype(np.float64)
        for at, key, a, gate, relevance, score in edges:
            grad_score = grad @ (key[2 * d :] - out["pooled"][t]) / (total + epsilon) + float(
                grads["score_sum"][t]
            )
            of_beta = grad_score * score * (1 - gate) / root
            of_rel = grad_score * a * gate / root if relevance > 0 else 0.0
            out["grad_query_beta"][t] += of_beta * key[:d]
            out["grad_query_rel"][t] += of_rel * key[d : 2 * d]
            out["grad_key_features"][at] += np.concatenate(
                [of_beta * q_beta, of_rel * q_rel, score / (total + epsilon) * grad]
            )
    return out


def history_range(
    rows: np.ndarray,
    cu_seqlens: np.ndarray,
    prompts: np.ndarray,
    history: str,
    skip_first: int,
    window: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The first key of I_t and the first visible key of each row, as positions in its sequence."""
    sequence = np.searchsorted(cu_seqlens, rows, side="right") - 1
    position = rows - cu_seqlens[sequence]
    visible = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    first = np.maximum(visible, skip_first)
    if history == "response":
        first = np.maximum(first, prompts[sequence])
    return np.minimum(first, position + 1), visible


@dataclass(frozen=True)
class VisibleKeys:
    """The keys of each row: packed start of its sequence, its own position in it, its first visible key."""

    start: np.ndarray
    position: np.ndarray
    visible_from: np.ndarray

    def scores(self, q: np.ndarray, k: np.ndarray, r: int, scale: float) -> np.ndarray:
        """scale · ⟨q_h,r , k_g(h),i⟩ over the visible keys, [heads, keys], in the precision of q and k."""
        first, last = self.start[r] + self.visible_from[r], self.start[r] + self.position[r]
        keys = k[first : last + 1].repeat(q.shape[1] // k.shape[1], axis=1)
        return np.einsum("hd,ihd->hi", q[r], keys) * q.dtype.type(scale)


def log_denominators(q: np.ndarray, k: np.ndarray, keys: VisibleKeys, scale: float) -> np.ndarray:
    """log Σ exp(score) over the visible keys of each row: [heads, rows]."""
    out = np.zeros((q.shape[1], len(q)), q.dtype)
    with np.errstate(invalid="ignore"):
        for r in range(len(q)):
            scores = keys.scores(q, k, r, scale)
            top = scores.max(1)
            out[:, r] = top + np.log(np.exp(scores - top[:, None]).sum(1))
    return out


def attention_rows(
    q: np.ndarray, k: np.ndarray, lse: np.ndarray, keys: VisibleKeys, scale: float
) -> list[np.ndarray]:
    """a of each row over its keys 0 … position (Eq. 18), 0 before the first visible one; the mean over heads.

    In the precision of its arguments: float32 ones make the yardstick for rounding errors.
    """
    rows = []
    with np.errstate(over="ignore", invalid="ignore"):
        for r in range(len(q)):
            weights = np.exp(keys.scores(q, k, r, scale) - lse[:, r, None].astype(q.dtype)).mean(0)
            rows.append(np.concatenate([np.zeros(keys.visible_from[r], q.dtype), weights]))
    return rows


def row_statistics(
    rows: list[np.ndarray],
    history_from: np.ndarray,
    *,
    renyi_alpha: float,
    mass_top_k: int,
    envelope: tuple[float, float, float],
) -> Arrays:
    """The accumulators of every row over I_t, and κ (Eq. 19–20)."""
    names = ("mass", "sum_squares", "entropy_sum", "max_weight", "power_sum", "topk_mass", "kappa")
    out: dict[str, list[float]] = {name: [] for name in names}
    for a, first in zip(rows, history_from, strict=True):
        x = a[first:]
        positive = x[x > 0]
        sums = {
            "mass": x.sum(),
            "sum_squares": (x * x).sum(),
            "entropy_sum": (positive * np.log(positive)).sum(),
            "max_weight": x.max(initial=0),
            "power_sum": (x**renyi_alpha).sum(),
            "topk_mass": np.sort(x)[::-1][:mass_top_k].sum(),
        }
        sums["kappa"] = _kappa(len(x), float(sums["mass"]), float(sums["sum_squares"]), *envelope)
        for name, value in sums.items():
            out[name].append(float(value))
    return {name: np.array(values) for name, values in out.items()}


def _kappa(num_history: int, mass: float, squares: float, lo: float, hi: float, tau: float) -> float:
    c = 0.5
    if num_history > 1 and 1e-20 <= mass < math.inf:
        c = min(1.0, max(0.0, math.log(num_history * squares / mass**2) / math.log(num_history)))
    return lo + (hi - lo) / (1 + math.exp(-tau * (c - 0.5)))

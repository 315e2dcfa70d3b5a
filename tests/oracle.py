"""The paper's equations in float64 numpy with plain loops. Imports nothing of the package.

One response, one sequence or one token at a time; readable before fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


# ---------------------------------------------------------------- concentration and gate (Eq. 18–20)


def attention_row(probs: np.ndarray, history: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean over heads of `probs` [Hq, S], over `history` bool [S]: the renormalised row and its mass."""
    num_heads, num_keys = probs.shape
    row = np.zeros(num_keys)
    for i in range(num_keys):
        if history[i]:
            row[i] = sum(float(probs[h, i]) for h in range(num_heads)) / num_heads
    mass = float(row.sum())
    return (row / mass if mass >= 1e-20 else row), mass


def row_concentration(
    probs: np.ndarray, history: np.ndarray, statistic: str = "herfindahl", alpha: float = 3.0, top_k: int = 8
) -> float:
    """c of one token from its attention probabilities [Hq, S] and valid history bool [S]."""
    a, mass = attention_row(probs, history)
    n = int(history.sum())
    if n <= 1 or mass < 1e-20:
        return 0.5
    p = [float(a[i]) for i in range(len(a)) if history[i]]
    log_n = math.log(n)
    if statistic == "herfindahl":
        c = math.log(n * sum(x * x for x in p)) / log_n
    elif statistic == "shannon":
        c = 1 + sum(x * math.log(x) for x in p if x > 0) / log_n
    elif statistic == "renyi":
        c = 1 - math.log(sum(x**alpha for x in p)) / (1 - alpha) / log_n
    elif statistic == "max":
        c = math.log(n * max(p)) / log_n
    elif statistic == "topk_mass":
        if n <= top_k:
            return 0.5
        c = math.log(n / top_k * sum(sorted(p)[-top_k:])) / math.log(n / top_k)
    else:
        raise ValueError(statistic)
    return min(1.0, max(0.0, c))


def gate(c: float, kappa_lo: float = 0.1, kappa_hi: float = 0.9, tau: float = 4.0) -> float:
    return kappa_lo + (kappa_hi - kappa_lo) * sigmoid(tau * (c - 0.5))


# ---------------------------------------------------------------- transport (Eq. 4–5, 10–11, 28)


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of one response without gaps under a fixed discount, V_T = 0."""
    advantage = np.zeros(len(rewards))
    next_value = next_advantage = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantage[t] = delta + gamma * lam * next_advantage
        next_value, next_advantage = values[t], advantage[t]
    return advantage, advantage + np.asarray(values, dtype=np.float64)


def move_rewards(rewards: Sequence[float], mask: Sequence[bool]) -> np.ndarray:
    """Rewards of gap tokens moved to the last valid token before them, or to the first valid one."""
    moved = np.zeros(len(rewards))
    for t in range(len(rewards)):
        before = [u for u in range(t + 1) if mask[u]]
        after = [u for u in range(t, len(rewards)) if mask[u]]
        if before:
            moved[before[-1]] += rewards[t]
        elif after:
            moved[after[0]] += rewards[t]
    return moved


def comp_gae(
    rewards: Sequence[float],
    values: Sequence[float],
    kappa: Sequence[float],
    mask: Sequence[bool],
    lam: float,
    gaps: str = "compact",
    bootstrap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """δ, A and G of one response; 0 at gap tokens."""
    num_tokens = len(rewards)
    if gaps == "compact":
        rewards = move_rewards(rewards, mask).tolist()
    delta, advantage, lambda_return = (np.zeros(num_tokens) for _ in range(3))
    next_value, next_advantage = bootstrap, 0.0
    for t in reversed(range(num_tokens)):
        if not mask[t]:
            if gaps == "cut":  # m_{t+1} = 0 for the token before
                next_value = next_advantage = 0.0
            continue
        delta[t] = rewards[t] + kappa[t] * next_value - values[t]
        advantage[t] = delta[t] + lam * kappa[t] * next_advantage
        lambda_return[t] = advantage[t] + values[t]
        next_value, next_advantage = values[t], advantage[t]
    return delta, advantage, lambda_return


def kernel(kappa: Sequence[float], lam: float) -> np.ndarray:
    """K of Eq. 13, entry by entry."""
    n = len(kappa)
    dense = np.zeros((n, n))
    for t in range(n):
        for u in range(t, n):
            product = 1.0
            for j in range(t, u):
                product *= lam * kappa[j]
            dense[t, u] = product
    return dense


def whiten(advantage: Sequence[float], clip: float, eps: float = 1e-8) -> np.ndarray:
    """Whitened advantages of all valid tokens of a rollout batch."""
    n = len(advantage)
    mean = sum(advantage) / n
    std = math.sqrt(sum((a - mean) ** 2 for a in advantage) / n)
    return np.array([min(clip, max(-clip, (a - mean) / (std + eps))) for a in advantage])


# ---------------------------------------------------------------- group baselines (Eq. 8)


def grpo(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """Coefficients of one group."""
    n = len(rewards)
    mean = sum(rewards) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
    return [(r - mean) / (std + eps) for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Coefficients of one group."""
    n = len(rewards)
    return [rewards[i] - sum(rewards[j] for j in range(n) if j != i) / (n - 1) for i in range(n)]


# ---------------------------------------------------------------- aligned critic (Eq. 21–27)

ValueHead = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class CriticWeights:
    """eta [L'], projections [d, D], and the two heads, each from a [D] vector to a number."""

    eta: np.ndarray
    w_beta_q: np.ndarray
    w_beta_k: np.ndarray
    w_rel_q: np.ndarray
    w_rel_k: np.ndarray
    value_local: ValueHead
    value_global: ValueHead


@dataclass(frozen=True)
class CriticToken:
    """What the aligned critic computes for one token. Lists run over the top-K, heaviest first."""

    hidden_fused: np.ndarray  # h̄_t
    index: list[int]
    edge_gate: list[float]  # β before the sigmoid
    relevance: list[float]  # m
    route_score: list[float]  # s
    dead: bool
    hidden_routed: np.ndarray  # h^G
    value_local: float
    value_global: float
    value_raw: float  # before the clamp
    value: float


def rms_norm(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps)


def fuse(hidden: np.ndarray, eta: np.ndarray, normalize: bool = True, norm_eps: float = 1e-6) -> np.ndarray:
    """h̄ [S, D] of Eq. 21 from the residual stream after each of the upper layers, [L', S, D]."""
    weights = [math.exp(float(e) - float(np.max(eta))) for e in eta]
    weights = [w / sum(weights) for w in weights]
    _, num_tokens, width = hidden.shape
    fused = np.zeros((num_tokens, width))
    for s in range(num_tokens):
        for layer, weight in enumerate(weights):
            h = np.asarray(hidden[layer, s], dtype=np.float64)
            fused[s] += weight * (rms_norm(h, norm_eps) if normalize else h)
    return fused


def top_history(row: np.ndarray, history: np.ndarray, k: int) -> list[int]:
    """The k positions of the history with the largest weight, ties to the smaller index."""
    valid = [i for i in range(len(row)) if history[i]]
    return sorted(valid, key=lambda i: (-float(row[i]), i))[:k]


def aligned_critic_token(
    fused: np.ndarray,
    position: int,
    row: np.ndarray,
    history: np.ndarray,
    kappa: float,
    weights: CriticWeights,
    top_k: int = 64,
    eps: float = 1e-8,
    bound: float = 1.0,
) -> CriticToken:
    """Value of the token predicted at `position`.

    `row` [S] is its attention row, renormalised over `history` bool [S]; `fused` is h̄ [S, D]. An empty
    history, or one without mass, has no top-K and is dead.
    """
    h_t = fused[position]
    root_d = math.sqrt(weights.w_beta_q.shape[0])
    empty = not history.any() or float(row[history].sum()) < 1e-20
    index = [] if empty else top_history(row, history, top_k)
    edge_gate, relevance, score = [], [], []
    for i in index:
        beta = float(np.dot(weights.w_beta_q @ h_t, weights.w_beta_k @ fused[i])) / root_d
        m = max(0.0, float(np.dot(weights.w_rel_q @ h_t, weights.w_rel_k @ fused[i])) / root_d)
        edge_gate.append(beta)
        relevance.append(m)
        score.append(float(row[i]) * sigmoid(beta) * m)
    total = sum(score)
    dead = total <= 1e-8
    routed = np.zeros_like(h_t)
    for i, s in zip(index, score, strict=True):
        routed += s / (total + eps) * fused[i]
    if dead:
        routed = h_t.copy()
    v_local, v_global = weights.value_local(h_t), weights.value_global(routed)
    raw = kappa * v_global + (1 - kappa) * v_local
    value = min(bound, max(-bound, raw))
    return CriticToken(h_t, index, edge_gate, relevance, score, dead, routed, v_local, v_global, raw, value)


def clipped_value_loss(value: float, old: float, target: float, clip: float = 0.5) -> float:
    near = old + min(clip, max(-clip, value - old))
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


def clipped_surrogate(
    log_prob: float, behavior_log_prob: float, advantage: float, clip: float = 0.2
) -> float:
    ratio = math.exp(log_prob - behavior_log_prob)
    return -min(ratio * advantage, min(1 + clip, max(1 - clip, ratio)) * advantage)

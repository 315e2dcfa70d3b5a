"""Behaviour pass and transport in float64: transformers for the policy, `tests.oracle` for what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from comppo_mcore.config.schema import Config
from comppo_mcore.model.batch import Sample
from comppo_mcore.trainer.transport import Evidence
from tests import oracle

Tokens = dict[str, dict[int, np.ndarray]]  # quantity → trajectory → [T]
Top = dict[tuple[int, int], list[int]]  # (trajectory, row) → positions, heaviest first


@dataclass(frozen=True)
class PolicyRead:
    """One trajectory under the policy, float64."""

    logprob: np.ndarray  # [T]
    attention: np.ndarray  # [heads, S, S] of the last layer
    hidden: np.ndarray  # [L', S, D], residual stream after each of the upper layers


def step(
    folder: Path, critic: Mapping[str, Tensor], samples: list[Sample], evidence: Evidence, config: Config
) -> tuple[Tokens, Top]:
    """log-probs, κ, V, A, G and the whitened advantages of every token, and the top-K of every row."""
    weights = critic_weights({name: w.double().numpy() for name, w in critic.items()})
    tokens: Tokens = {}
    top: Top = {}
    for i, read in enumerate(read_policy(folder, samples, config)):
        kappa, value = [], []
        for t in range(len(samples[i].response)):
            k, token = estimate(read, len(samples[i].prompt) - 1 + t, weights, config)
            kappa.append(k)
            value.append(token.value)
            top[i, t] = token.index
        mask = evidence.masks[i]
        rewards = [0.0] * len(mask)
        rewards[max(t for t, valid in enumerate(mask) if valid)] = float(evidence.rewards[i])
        _, advantage, lambda_return = oracle.comp_gae(rewards, value, kappa, mask, config.transport.lam)
        arrays = {"logprob": read.logprob, "kappa": kappa, "value": value}
        for name, x in (arrays | {"advantage": advantage, "lambda_return": lambda_return}).items():
            tokens.setdefault(name, {})[i] = np.asarray(x)
    tokens["credit"] = whitened(tokens["advantage"], evidence, config.algo.advantage_clip)
    return tokens, top


@torch.no_grad()
def read_policy(folder: Path, samples: list[Sample], config: Config) -> list[PolicyRead]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    upper: list[np.ndarray] = []
    for layer in model.model.layers[-config.critic.layers :]:
        layer.register_forward_hook(lambda _, __, out: upper.append(out[0].numpy()))
    reads = []
    for sample in samples:
        upper.clear()
        out = model(torch.tensor([[*sample.prompt, *sample.response]]), output_attentions=True)
        logits = out.logits[0, len(sample.prompt) - 1 : -1] / config.rollout.temperature
        logprob = logits.log_softmax(-1)[range(len(sample.response)), list(sample.response)]
        reads.append(PolicyRead(logprob.numpy(), out.attentions[-1][0].numpy(), np.stack(upper)))
    return reads


def estimate(
    read: PolicyRead, position: int, weights: oracle.CriticWeights, config: Config
) -> tuple[float, oracle.CriticToken]:
    """κ and the critic's reading of the token predicted at `position`."""
    gate, probs = config.gate, read.attention[:, position]
    history = np.arange(probs.shape[1]) <= position
    row, _ = oracle.attention_row(probs, history)
    c = oracle.row_concentration(probs, history)
    kappa = oracle.gate(c, gate.kappa_lo, gate.kappa_hi, gate.tau)
    fused = oracle.fuse(read.hidden[:, : position + 1], weights.eta)
    seen = slice(position + 1)
    return kappa, oracle.aligned_critic_token(
        fused, position, row[seen], history[seen], kappa, weights, config.critic.top_k
    )


def critic_weights(w: Mapping[str, np.ndarray]) -> oracle.CriticWeights:
    def head(kind: str) -> oracle.ValueHead:
        w1, b1, w2, b2 = (w[f"{name}_{kind}"] for name in ("w1", "b1", "w2", "b2"))
        return lambda h: float(w2 @ np.tanh(w1 @ h + b1) + b2)

    return oracle.CriticWeights(
        eta=w["eta"],
        w_beta_q=w["beta_q"],
        w_beta_k=w["beta_k"],
        w_rel_q=w["rel_q"],
        w_rel_k=w["rel_k"],
        value_local=head("local"),
        value_global=head("routed"),
    )


def whitened(advantage: Mapping[int, np.ndarray], evidence: Evidence, clip: float) -> dict[int, np.ndarray]:
    valid = {i: np.array(evidence.masks[i]) for i in advantage}
    white = iter(oracle.whiten([x for i, a in advantage.items() for x in a[valid[i]]], clip))
    return {i: np.array([next(white) if v else 0.0 for v in valid[i]]) for i in advantage}

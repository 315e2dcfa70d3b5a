"""After a weight sync: does whatever generates score a prompt as the trainer does?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from comppo_mcore.config.schema import Config
from comppo_mcore.errors import UserError
from comppo_mcore.model.batch import Sample
from comppo_mcore.model.parallel import Layout, from_last_stage, on_first_rank
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.rollout.engine import Engine, EngineLost
from comppo_mcore.rollout.gap import Gap, engine_gap
from comppo_mcore.trainer.behavior import logprob_pass

MAX_TOKENS = 256


def probe(
    engine: Engine, policy: PolicyModel, token_ids: Sequence[int], config: Config, layout: Layout
) -> None:
    """Compare log-probs of a known text, at T = 1; collective over the world.

    Args:
        token_ids: two or more; the first `MAX_TOKENS` are scored.

    Raises:
        UserError: on the first rank: an instance differs by more than `rollout.sglang.probe_limit`.
    """
    first, *rest = token_ids[:MAX_TOKENS]
    scored = logprob_pass(policy, [Sample((first,), tuple(rest))], config, layout, temperature=1.0)
    ours = from_last_stage(None if scored is None else scored.tolist(), layout)

    def compare() -> None:
        try:
            theirs = engine.score((first, *rest))
        except EngineLost as error:
            raise UserError(f"rollout.engine: no server answered after the weight sync: {error}") from error
        check_scores(ours, theirs, config.rollout.sglang.probe_limit)

    on_first_rank(compare)


def check_scores(ours: Sequence[float], theirs: Mapping[str, Sequence[float]], limit: float) -> None:
    """Raise unless every instance's log-probs are the trainer's, within `limit` on average."""
    for name, scores in theirs.items():
        gap = _gap(scores, ours)
        if not gap.mean <= limit:
            raise UserError(
                f"rollout.sglang.probe_limit is {limit:g} nats per token, but after the weight sync {name} "
                f"scores a prompt {gap.mean:.4g} away from the trainer on average, {gap.largest:.4g} at most "
                f"({gap.tokens} tokens): check that it serves the model of model.path in model.dtype"
            )


def _gap(theirs: Sequence[float], ours: Sequence[float]) -> Gap:
    a, b = torch.tensor(theirs), torch.tensor(ours)
    return engine_gap(a, b, torch.ones(len(b), dtype=torch.bool))

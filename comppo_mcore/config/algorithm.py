"""What the name of an algorithm implies for the other fields."""

from __future__ import annotations

from typing import Any

from comppo_mcore.config.schema import Config


def has_critic(config: Config) -> bool:
    """Whether the algorithm learns values; the group baselines do not."""
    return config.algo.name in ("comppo", "ppo")


def fill_algorithm(config: Config) -> Config:
    """The configuration with everything set that `algo.name` decides; what it decides wins over the file.

    ppo is CompPO with κ ≡ γ and the standard critic (Prop. 1). Only comppo keeps `gate.calibrate`.
    `algo.aggregation` auto becomes `sequence` for grpo (Eq. 8) and `token` otherwise.
    """
    if config.algo.name != "comppo":
        config = _with(config, "gate", calibrate=None)
    if config.algo.name == "ppo":
        config = _with(config, "gate", mode="fixed", fixed_kappa=config.transport.gamma)
        config = _with(config, "critic", kind="standard")
    if config.algo.aggregation == "auto":
        config = _with(config, "algo", aggregation="sequence" if config.algo.name == "grpo" else "token")
    return config


def _with(config: Config, section: str, **fields: Any) -> Config:
    changed = getattr(config, section).model_copy(update=fields)
    return config.model_copy(update={section: changed})

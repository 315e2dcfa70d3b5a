"""Every field of a run's configuration, its type, its default and the rules between fields.

Fields are named after the paper's symbols where it has one. Defaults are the paper's
(Table 13) or, where it is silent, the decisions listed in docs/paper_map.md.
Units are in the comments. Unknown keys are refused; see `config.load`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Strict and immutable: no coercion between types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str = "run"
    dir: str = "runs"  # the run folder is <dir>/<name>
    seed: int = 17
    allow_config_change: bool = False  # continue a run although its config differs


class ModelConfig(Section):
    path: str = ""  # folder with HF config.json, tokenizer and, for weights=load, safetensors
    weights: Literal["load", "random"] = "load"
    dtype: Literal["fp32", "bf16"] = "bf16"
    backend: Literal["auto", "transformer_engine", "local"] = "auto"
    recompute: bool = False  # activation checkpointing of every layer
    max_context: int | None = None  # tokens of prompt + response; default: the HF config's


class ParallelConfig(Section):
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    last_stage_layers: int | None = Field(default=None, ge=1)  # None: layers split evenly
    timeout_minutes: float = Field(default=10.0, gt=0)  # of every collective


class KernelConfig(Section):
    mode: Literal["auto", "require", "reference"] = "auto"


class CalibrateConfig(Section):
    reach: float = Field(default=1.0, gt=0, le=1)  # share of the median response credit must reach
    keep: Literal["lam", "free"] = "lam"


class GateConfig(Section):
    mode: Literal["attention", "fixed", "shuffled", "position"] = "attention"
    statistic: Literal["herfindahl", "shannon", "renyi", "max", "topk_mass"] = "herfindahl"
    renyi_alpha: float = Field(default=3.0, gt=0)
    mass_top_k: int = Field(default=8, ge=1)
    kappa_lo: float = Field(default=0.1, ge=0, le=1)
    kappa_hi: float = Field(default=0.9, ge=0, le=1)
    tau: float = Field(default=4.0, gt=0)
    history: Literal["all", "response"] = "all"
    skip_first: int = Field(default=0, ge=0)
    fixed_kappa: float = Field(default=0.61, ge=0, le=1)  # κ of mode fixed; γ of PPO is transport.gamma
    table: str | None = None  # JSON written by `comppo gate-table`, for mode position
    calibrate: CalibrateConfig | None = None
    watch_other_history: bool = False  # also log κ over the history that is not in use
    recompute_per_epoch: bool = False
    drift_every: int = Field(default=10, ge=0)  # steps between gate-drift measurements; 0: never


class TransportConfig(Section):
    lam: float = Field(default=0.95, ge=0, le=1)
    gamma: float = Field(default=1.0, ge=0, le=1)  # of algorithm ppo only
    gaps: Literal["compact", "cut"] = "compact"
    bootstrap_on_truncation: bool = False


class CriticConfig(Section):
    kind: Literal["aligned", "standard"] = "aligned"
    layers: int = Field(default=4, ge=1)  # L': upper layers whose hidden states are fused
    top_k: int = Field(default=64, ge=1, le=64)
    width: int = Field(default=128, ge=1)  # d of Eq. 22 and 24
    head_width: int = Field(default=256, ge=1)
    normalize_features: bool = True
    clamp_gradient: Literal["hard", "inward"] = "hard"
    backbone_grad: Literal["none", "full"] = "none"
    lr: float = Field(default=1e-5, gt=0)
    grad_clip: float = Field(default=1.0, gt=0)
    value_clip: float = Field(default=0.5, gt=0)
    warmup_steps: int = Field(default=5, ge=0)


class KLConfig(Section):
    coef: float = Field(default=2e-3, ge=0)
    kind: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"


class AlgoConfig(Section):
    name: Literal["comppo", "ppo", "grpo", "rloo"] = "comppo"
    clip: float = Field(default=0.2, gt=0)
    ratio: Literal["full", "mask"] = (
        "full"  # softmax over the vocabulary, or over what top-p left to draw from
    )
    advantage_clip: float = Field(default=5.0, gt=0)
    epochs: int = Field(default=2, ge=1)
    minibatch: int = Field(default=4, ge=1)  # trajectories per optimizer step, all data-parallel ranks
    aggregation: Literal["auto", "token", "sequence", "constant"] = "auto"
    aggregation_constant: float = Field(default=1000.0, gt=0)  # tokens per trajectory, for `constant`
    kl: KLConfig = KLConfig()
    importance_cap: float | None = Field(default=None, gt=0)  # truncated engine-to-trainer correction


class OptimConfig(Section):
    lr: float = Field(default=1e-6, gt=0)  # of the actor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)  # of the actor's own norm
    name: Literal["adamw", "sgd"] = "adamw"


class SGLangConfig(Section):
    """The servers of `rollout.engine: sglang`."""

    urls: tuple[str, ...] = ()  # running servers to join; empty: start `servers` on this host
    python: str = ".venv-sglang/bin/python"  # interpreter of the servers' environment
    servers: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)  # GPUs of each server
    memory_fraction: float = Field(default=0.8, gt=0, lt=1)  # of a GPU's memory: weights and KV cache
    args: tuple[str, ...] = ()  # further words for `sglang.launch_server`
    placement: Literal["colocated", "disaggregated"] = "disaggregated"  # share the trainer's GPUs, or not
    transport: Literal["broadcast", "tensor", "disk"] = "broadcast"  # of the weights
    master_address: str = "127.0.0.1"  # of the first rank, as the servers reach it; for broadcast
    bucket_mb: int = Field(default=512, ge=1)  # weights sent at a time, MiB
    in_flight: int = Field(default=128, ge=1)  # requests at a time, each server
    start_timeout_s: float = Field(default=900.0, gt=0)
    request_timeout_s: float = Field(default=1800.0, gt=0)  # of one generation
    sync_timeout_s: float = Field(default=300.0, gt=0)  # of each request of a weight sync
    probe_limit: float = Field(default=0.1, gt=0)  # mean |server − trainer| log-prob after a sync, nats


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    prompts: int = Field(default=4, ge=1)  # per step
    responses: int = Field(default=4, ge=1)  # per prompt
    max_response_tokens: int = Field(default=16384, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=0.7, gt=0, le=1)
    gap_limit: float = Field(default=0.1, gt=0)  # mean |engine − trainer| log-prob, nats per token
    batch_size: int = Field(default=64, ge=1)  # sequences an embedded engine decodes at once
    oversample: int = Field(default=0, ge=0)  # prompts begun beyond `prompts`; the first to finish count
    partial: bool = False  # what is aborted goes on in the next step, with new weights
    max_wait_s: float | None = Field(default=None, gt=0)  # then what still runs counts as truncated
    lag: Literal[0, 1] = 0  # 1: generate the next step's responses while this one trains
    sglang: SGLangConfig = SGLangConfig()


class ArithmeticConfig(Section):
    """The built-in multi-step arithmetic task (mod 10) with planted misconceptions."""

    steps: int = Field(default=4, ge=1, le=12)
    misconceptions: float = Field(default=0.25, ge=0, le=1)  # share of table entries
    strength: tuple[float, float] = (0.35, 0.85)  # probability that one is used


class DataConfig(Section):
    source: Literal["arithmetic", "file", "reasoning_gym"] = "file"
    path: str | None = None  # .jsonl or .parquet, for source file
    prompt_key: str = "prompt"  # dotted keys reach into nested records
    answer_key: str = "answer"
    eval_path: str | None = None  # held-out problems; default: the last eval_holdout of path
    eval_holdout: int = Field(default=500, ge=0)
    tasks: tuple[str, ...] = ()  # for source reasoning_gym
    system_prompt: str | None = None
    template: str = "{prompt}"  # the user message
    arithmetic: ArithmeticConfig = ArithmeticConfig()


class Ramp(Section):
    """Linear from `start` at step `begin` to `end` at step `stop`; `before` until `begin`."""

    begin: int = Field(default=0, ge=0)
    stop: int = Field(default=0, ge=0)
    start: float = 0.0
    end: float = 0.0
    before: float | None = None  # None: `start`


class RewardConfig(Section):
    wrong: Literal[0, -1] = 0
    floor: bool = True  # a correct answer never earns less than 0
    format: Ramp = Ramp(begin=0, stop=40, start=0.2, end=1.0)
    length: Ramp = Ramp(begin=20, stop=60, start=3e-5, end=8e-5, before=0.0)
    truncated_is_malformed: bool = True
    workers: int = Field(default=2, ge=1)
    timeout_s: float = Field(default=10.0, gt=0)  # wall clock per answer
    memory_mb: int = Field(default=2048, ge=64)  # address space per worker


class ControllerConfig(Section):
    preset: Literal["off", "default", "paper_literal"] = "default"
    disabled_rules: tuple[str, ...] = ()
    ramp: tuple[int, int] | None = (25, 40)  # fresh phase-0 runs: stable → warning knobs


class TrainConfig(Section):
    steps: int = Field(default=100, ge=0)
    micro_batch_tokens: int = Field(default=20480, ge=1)
    eval_every: int = Field(default=20, ge=0)  # 0: only at the end
    eval_problems: int = Field(default=500, ge=1)
    eval_majority: int = Field(default=0, ge=0)  # k of majority@k; 0: greedy pass@1 only
    save_every: int = Field(default=20, ge=0)  # 0: only at the end
    keep_last: int = Field(default=2, ge=1)
    keep_best: bool = True
    max_bad_steps: int = Field(default=3, ge=1)  # consecutive steps with NaN or inf before stopping


class LogConfig(Section):
    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "comppo"
    progress: bool = True


class SftConfig(Section):
    """Supervised warm start (`comppo sft`)."""

    steps: int = Field(default=200, ge=1)
    batch: int = Field(default=64, ge=1)  # examples per optimizer step, all data-parallel ranks
    lr: float = Field(default=2e-3, gt=0)
    warmup: int = Field(default=20, ge=0)
    path: str | None = None  # records with a response; arithmetic makes its own
    response_key: str = "response"
    out: str = ""  # HF folder to write; default <run folder>/hf


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    kernels: KernelConfig = KernelConfig()
    algo: AlgoConfig = AlgoConfig()
    gate: GateConfig = GateConfig()
    transport: TransportConfig = TransportConfig()
    critic: CriticConfig = CriticConfig()
    optim: OptimConfig = OptimConfig()
    rollout: RolloutConfig = RolloutConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    controller: ControllerConfig = ControllerConfig()
    train: TrainConfig = TrainConfig()
    sft: SftConfig = SftConfig()
    log: LogConfig = LogConfig()

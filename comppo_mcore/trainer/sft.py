"""Supervised warm start, `comppo sft`: same model, packing and optimizer as the reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from comppo_mcore.config.load import dump
from comppo_mcore.config.model_shape import read_model_shape
from comppo_mcore.config.schema import Config, SftConfig
from comppo_mcore.data.dataset import Examples, load_examples
from comppo_mcore.data.problems import Example
from comppo_mcore.data.sampler import prompt_indices
from comppo_mcore.data.tokenizer import encode_prompt, encode_response
from comppo_mcore.errors import UserError
from comppo_mcore.kernels.select import select
from comppo_mcore.model import parallel
from comppo_mcore.model.batch import Sample, pack
from comppo_mcore.model.critic import ValueParts
from comppo_mcore.model.execution import Work, forward_backward
from comppo_mcore.model.factory import torch_dtype
from comppo_mcore.model.hf import save_hf
from comppo_mcore.model.optimizer import PolicyOptimizer, Rates, wrap
from comppo_mcore.model.policy import Pass, PolicyOutput
from comppo_mcore.reward.pool import Grader
from comppo_mcore.trainer.evaluate import evaluate
from comppo_mcore.trainer.files import write_text_atomic
from comppo_mcore.trainer.logging import Sink, StageClock, memory_metrics, open_sink
from comppo_mcore.trainer.schedule import pack_micro_batches
from comppo_mcore.trainer.session import TrainSession, build_engine, load_policy, load_text, sync_weights


@dataclass(frozen=True)
class SftWork(Work):
    """One micro-batch and the token count of its whole optimizer step, over all ranks."""

    tokens: float = 1.0


def main(config: Config) -> None:
    """Imitate the examples for `sft.steps` optimizer steps and write a Hugging Face folder.

    Raises:
        UserError: the run folder holds a training run, or the loss is not finite.
    """
    folder = Path(config.run.dir) / config.run.name
    refuse_training_run(folder, config.run.name)
    examples = load_examples(config)
    session = build_sft_session(config)
    out = Path(config.sft.out) if config.sft.out else folder / "hf"
    if session.layout.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(folder / "config.yaml", dump(config))
    sink = open_sink(config, folder, rank=session.layout.rank, steps=config.sft.steps)
    try:
        for step in range(1, config.sft.steps + 1):
            clock = StageClock(sink.stage)
            with clock("sft"):
                metrics = sft_step(session, step_samples(session, examples, step), step)
            if not math.isfinite(metrics["grad/actor"]):
                raise UserError(f"sft.lr is {config.sft.lr} and step {step} gave NaN or inf: lower it")
            sink.step(step, metrics | clock.metrics() | memory_metrics())
        save_hf(session.policy, config.model.path, out)
        sink.note(f"warm start after {config.sft.steps} steps: {accuracy(session, sink)}model in {out}")
    finally:
        session.engine.close()
        sink.close()
    parallel.shutdown()


def refuse_training_run(folder: Path, name: str) -> None:
    """A warm start begins `metrics.jsonl` anew, which must not be that of a run of `comppo train`."""
    if (folder / "checkpoints").exists():
        raise UserError(
            f"run.name is {name}, but {folder} holds a training run with its checkpoints: choose another name"
        )


def accuracy(session: TrainSession, sink: Sink) -> str:
    """Held-out accuracy in words; nothing where there are no held-out problems."""
    if not session.text.dataset.eval_problems(1):
        return ""
    sync_weights(session, session.config.sft.steps)
    sink.stage("evaluation")
    with Grader(session.config.reward) as grader:
        result = evaluate(session, grader, session.config.sft.steps)
    return f"greedy accuracy {result.accuracy:.3f} on {result.num_problems} held-out problems; "


def build_sft_session(config: Config) -> TrainSession:
    """A policy without critic or reference."""
    shape = read_model_shape(config.model.path)
    text = load_text(config, shape)
    layout = parallel.initialize(config.parallel, config.run.seed)
    kernels = select(config.kernels.mode)
    policy = load_policy(config, shape, layout, kernels, with_critic=False)
    dtype = torch_dtype(config.model.dtype)
    ddp = wrap(policy, layout, dtype)
    optimizer = PolicyOptimizer(ddp, config.optim, config.sft.lr, dtype, layout)
    engine = build_engine(config, shape, layout)
    return TrainSession(
        config, shape, layout, kernels, text, policy, engine, ddp=ddp, optimizer=optimizer, reference=None
    )


def step_samples(session: TrainSession, examples: Examples, step: int) -> list[Sample]:
    """This data-parallel rank's examples of one optimizer step."""
    config, layout = session.config, session.layout
    share = config.sft.batch // layout.dp_size
    consumed = (step - 1) * config.sft.batch + layout.dp_rank * share
    indices = prompt_indices(config.run.seed, consumed, share, examples.num_examples)
    return [_sample(session, examples.example(i)) for i in indices]


def _sample(session: TrainSession, example: Example) -> Sample:
    tokenizer, limit = session.text.tokenizer, session.config.train.micro_batch_tokens
    context = min(limit, session.config.model.max_context or session.shape.max_positions)
    prompt = encode_prompt(tokenizer, example)
    sample = Sample(prompt.token_ids, encode_response(tokenizer, example.response))
    if sample.num_tokens > context:
        raise UserError(
            f"sft.path has example {example.id} of {sample.num_tokens} tokens, but the context is {context}: "
            "drop it, or raise train.micro_batch_tokens and model.max_context"
        )
    return sample


def sft_step(session: TrainSession, samples: Sequence[Sample], step: int) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of the response tokens of all ranks."""
    config, layout = session.config, session.layout
    tokens = torch.tensor(float(sum(len(s.response) for s in samples)), device=layout.device)
    total = float(parallel.all_reduce_sum(tokens, layout.groups.dp))
    multiple = layout.tp_size if config.parallel.sequence_parallel else 1
    cut = pack_micro_batches([s.num_tokens for s in samples], config.train.micro_batch_tokens)
    work = [SftWork(pack(samples, index, layout.device, multiple_of=multiple), tokens=total) for index in cut]
    records = forward_backward(session.ddp, work, Pass(), layout, _negative_log_likelihood)
    lr = learning_rate(config.sft, step)
    result = session.optimizer.step(
        Rates(lr, lr, config.optim.grad_clip, config.optim.grad_clip, config.optim.weight_decay)
    )
    loss = None
    if records:
        loss = float(parallel.all_reduce_sum(torch.stack(records).sum(), layout.groups.dp))
    return {
        "loss/sft": parallel.from_last_stage(loss, layout),
        "grad/actor": result.norms["actor"],
        "sft/lr": lr,
        "sft/tokens": total,
    }


def _negative_log_likelihood(item: SftWork, out: PolicyOutput, _: ValueParts | None) -> tuple[Tensor, Tensor]:
    loss = -out.logprob.sum() / item.tokens
    return loss, loss.detach().clone()  # Megatron divides the loss in place


def learning_rate(config: SftConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak, which a short run needs to settle."""
    warm = min(1.0, step / config.warmup) if config.warmup else 1.0
    progress = (step - 1) / max(1, config.steps - 1)
    return config.lr * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)

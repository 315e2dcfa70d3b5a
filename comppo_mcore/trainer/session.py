"""Everything a command works with, built once from the configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comppo_mcore.config.algorithm import has_critic
from comppo_mcore.config.model_shape import ModelShape, read_model_shape
from comppo_mcore.config.schema import Config
from comppo_mcore.data.dataset import Dataset, FileDataset, load_dataset
from comppo_mcore.data.tokenizer import check_prompt_lengths, encode_prompt, load_tokenizer, stop_token_ids
from comppo_mcore.errors import UserError
from comppo_mcore.kernels.select import Kernels, select
from comppo_mcore.model.factory import build_policy, torch_dtype
from comppo_mcore.model.hf import export_hf, import_hf
from comppo_mcore.model.hf_table import hf_manifest
from comppo_mcore.model.optimizer import PolicyOptimizer, wrap
from comppo_mcore.model.parallel import Layout, initialize
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.rollout.embedded import EmbeddedEngine
from comppo_mcore.rollout.engine import Engine
from comppo_mcore.rollout.sglang.engine import SGLangEngine
from comppo_mcore.rollout.sglang.process import ServerProcesses, gpus_for_servers, plan
from comppo_mcore.trainer.probe import probe
from comppo_mcore.trainer.update import needs_reference


@dataclass(frozen=True)
class Text:
    """Problems and the tokenizer that spells them."""

    dataset: Dataset
    tokenizer: Any
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Session:
    """The parts of a run on this rank."""

    config: Config
    shape: ModelShape
    layout: Layout
    kernels: Kernels
    text: Text
    policy: PolicyModel
    engine: Engine


@dataclass(frozen=True)
class TrainSession(Session):
    """A session that also updates the policy."""

    ddp: Any  # the policy in Megatron's DDP
    optimizer: PolicyOptimizer
    reference: PolicyModel | None  # frozen, from the same weights the run started with


def load_text(config: Config, shape: ModelShape) -> Text:
    """Problems and tokenizer, checked against each other and against the model.

    Without a problem file, which a warm start on `sft.path` can do without, there are no problems.
    """
    no_file = config.data.source == "file" and config.data.path is None
    dataset = FileDataset((), ()) if no_file else load_dataset(config)
    tokenizer = load_tokenizer(config.model.path)
    if len(tokenizer) > shape.vocab_size:
        raise UserError(
            f"model.path {config.model.path!r} has a tokenizer of {len(tokenizer)} tokens but a model of "
            f"vocab_size {shape.vocab_size}: give the tokenizer the model was made for"
        )
    prompts = [encode_prompt(tokenizer, p) for p in dataset.eval_problems(config.train.eval_problems)]
    check_prompt_lengths(prompts, max_prompt_tokens(config, shape))
    return Text(dataset, tokenizer, stop_token_ids(config.model.path, tokenizer))


def max_prompt_tokens(config: Config, shape: ModelShape) -> int:
    """What the context leaves for a prompt beside a response of full length."""
    context = config.model.max_context or shape.max_positions
    return max(0, context - config.rollout.max_response_tokens)


def check_training_prompts(config: Config, shape: ModelShape, text: Text) -> None:
    """Before any work: every prompt fits the context and a micro-batch together with a full response.

    Of a source without end only the first step's prompts are read. A thousand take some tenths of a second.

    Raises:
        UserError: one does not.
    """
    dataset, response = text.dataset, config.rollout.max_response_tokens
    count = dataset.num_train or config.rollout.prompts
    prompts = [encode_prompt(text.tokenizer, dataset.train_problem(i)) for i in range(count)]
    check_prompt_lengths(prompts, max_prompt_tokens(config, shape))
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    length, limit = len(longest.token_ids), config.train.micro_batch_tokens
    if length + response > limit:
        raise UserError(
            f"train.micro_batch_tokens is {limit}, but prompt {longest.problem_id} has {length} tokens and "
            f"rollout.max_response_tokens is {response}: set it to at least their sum, {length + response}"
        )


def build_session(config: Config) -> Session:
    """Policy without critic and an engine: what evaluation needs."""
    shape = read_model_shape(config.model.path)
    text = load_text(config, shape)
    layout = initialize(config.parallel, config.run.seed)
    kernels = select(config.kernels.mode)
    policy = load_policy(config, shape, layout, kernels, with_critic=False)
    return Session(config, shape, layout, kernels, text, policy, build_engine(config, shape, layout))


def build_train_session(config: Config) -> TrainSession:
    """Policy with its critic, optimizer, reference and engine."""
    shape = read_model_shape(config.model.path)
    text = load_text(config, shape)
    check_training_prompts(config, shape, text)
    layout = initialize(config.parallel, config.run.seed)
    kernels = select(config.kernels.mode)
    policy = load_policy(config, shape, layout, kernels, with_critic=has_critic(config))
    reference = None
    if needs_reference(config):
        reference = load_policy(config, shape, layout, kernels, with_critic=False)
        reference.requires_grad_(False)
        reference = reference.to(torch_dtype(config.model.dtype))
    ddp = wrap(policy, layout, torch_dtype(config.model.dtype))
    optimizer = PolicyOptimizer(ddp, config.optim, config.critic.lr, torch_dtype(config.model.dtype), layout)
    engine = build_engine(config, shape, layout)
    return TrainSession(
        config,
        shape,
        layout,
        kernels,
        text,
        policy,
        engine,
        ddp=ddp,
        optimizer=optimizer,
        reference=reference,
    )


def load_policy(
    config: Config, shape: ModelShape, layout: Layout, kernels: Kernels, *, with_critic: bool
) -> PolicyModel:
    policy = build_policy(config, shape, layout, kernels, with_critic=with_critic)
    if config.model.weights == "load":
        import_hf(policy, config.model.path)
    return policy


def build_engine(config: Config, shape: ModelShape, layout: Layout) -> Engine:
    """The engine of `rollout.engine`; collective over the world."""
    dtype = torch_dtype(config.model.dtype)
    if config.rollout.engine == "embedded":
        return EmbeddedEngine(config.model.path, dtype, config.rollout.batch_size, layout.device)
    context, folder = config.model.max_context or shape.max_positions, run_folder(config)
    processes = None
    if not config.rollout.sglang.urls and layout.rank == 0:
        processes = start_servers(config, context, folder, layout)
    return SGLangEngine(
        config.rollout.sglang,
        processes,
        hf_manifest(config.model.path, dtype),
        shape=shape,
        max_context=context,
        device=layout.device,
        folder=folder,
    )


def start_servers(config: Config, max_context: int, folder: Path, layout: Layout) -> ServerProcesses:
    """The servers of this run, planned; the engine starts them."""
    servers = config.rollout.sglang
    launches = plan(
        servers,
        Path(config.model.path),
        dtype=config.model.dtype,
        max_context=max_context,
        seed=config.run.seed,
        folder=folder,
        gpus=gpus_for_servers(servers, int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))),
    )
    return ServerProcesses(launches, start_timeout_s=servers.start_timeout_s)


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def sync_weights(session: Session, version: int) -> None:
    """Hand the policy's weights to the engine, tensor by tensor; collective over the world.

    Raises:
        UserError: afterwards a shared engine does not score a prompt as the trainer does.
    """
    session.engine.update_weights(export_hf(session.policy, session.engine.manifest), version)
    if session.engine.shared:
        problem = (session.text.dataset.eval_problems(1) or [session.text.dataset.train_problem(0)])[0]
        token_ids = encode_prompt(session.text.tokenizer, problem).token_ids
        probe(session.engine, session.policy, token_ids, session.config, session.layout)

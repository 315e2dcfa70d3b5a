"""`comppo convert`: Hugging Face folders to Megatron checkpoints and back, at any TP and PP."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from comppo_mcore.config.check import check_model
from comppo_mcore.config.model_shape import read_model_shape
from comppo_mcore.config.schema import Config, ParallelConfig
from comppo_mcore.errors import UserError
from comppo_mcore.kernels.select import select
from comppo_mcore.model import parallel, weights
from comppo_mcore.model.checkpoint import read_trainer_state
from comppo_mcore.model.factory import build_policy, torch_dtype
from comppo_mcore.model.hf import import_hf, save_hf, stored_dtype
from comppo_mcore.model.hf_table import hf_manifest
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import PolicyModel


@dataclass(frozen=True)
class Conversion:
    """What the command line asks for."""

    source: Path
    out: Path
    to: Literal["megatron", "hf"]
    parallel: ParallelConfig  # of the model in between, which writes or reads the checkpoint
    dtype: Literal["fp32", "bf16"] | None  # of the weights written; None: the source's
    template: Path | None  # HF folder with config and tokenizer; None: those the checkpoint knows


def main(job: Conversion) -> None:
    """`convert`, then leave the process group."""
    convert(job)
    parallel.shutdown()


def convert(job: Conversion) -> None:
    """Write what is asked for; collective over the world.

    Raises:
        UserError: OUT exists or cannot be written; the source is damaged, of an unknown family, or holds
            other weights than its config.json says.
    """
    if job.out.exists():
        raise UserError(f"OUT {str(job.out)!r} exists: remove it or name another")
    with _named_as_arguments(job):
        if job.to == "megatron":
            _to_megatron(job)
        else:
            _to_hf(job)


def _to_megatron(job: Conversion) -> None:
    read_model_shape(job.source)  # whether it is a Hugging Face folder is said before what its weights are
    policy, layout = _build(job, job.source, job.dtype or stored_dtype(job.source))
    import_hf(policy, job.source)
    weights.save(policy, layout, job.source, job.out)
    _report(job, job.source, layout)


def _to_hf(job: Conversion) -> None:
    dtype = weights.dtype_of(job.source)
    template = job.template or _known_template(job.source)
    policy, layout = _build(job, template, "bf16" if dtype == torch.bfloat16 else "fp32")
    weights.load(policy, layout, job.source)
    try:
        save_hf(policy, template, job.out, dtype=torch_dtype(job.dtype) if job.dtype else dtype)
    except OSError as error:
        raise UserError(str(error)) from error
    _report(job, template, layout)


def _build(job: Conversion, folder: Path, dtype: str) -> tuple[PolicyModel, Layout]:
    config = Config.model_validate(
        {"model": {"path": str(folder), "dtype": dtype}, "parallel": job.parallel.model_dump()}
    )
    shape = read_model_shape(folder)
    check_model(config, shape, job.parallel.tp * job.parallel.pp)
    layout = parallel.initialize(config.parallel, config.run.seed)
    return build_policy(config, shape, layout, select("reference"), with_critic=False), layout


def _known_template(checkpoint: Path) -> Path:
    """The HF files inside a converted checkpoint, or those that a training run was given."""
    inside = checkpoint / weights.HF_FILES
    if inside.is_dir():
        return inside
    if (checkpoint / "trainer.json").is_file():
        return Path(read_trainer_state(checkpoint)["config"]["model"]["path"])
    raise UserError(
        f"--template is not given and checkpoint {str(checkpoint)!r} holds no config.json and tokenizer; "
        "name a Hugging Face folder of the same model"
    )


def _report(job: Conversion, folder: Path, layout: Layout) -> None:
    tensors = hf_manifest(folder).values()
    if layout.rank == 0:
        total = sum(math.prod(tensor.shape) for tensor in tensors)
        print(f"{job.out}: {len(tensors)} tensors, {total:,} parameters from {job.source}", flush=True)


@contextlib.contextmanager
def _named_as_arguments(job: Conversion) -> Iterator[None]:
    """Errors name fields of a configuration, which this command takes as arguments instead."""
    arguments = {
        "model.path": "SOURCE" if job.to == "megatron" else "--template",
        "model.dtype": "--dtype",
        "parallel.tp": "--tp",
        "parallel.pp": "--pp",
        "parallel.last_stage_layers": "--last-stage-layers",
    }
    try:
        yield
    except UserError as error:
        sentence = str(error)
        for field, argument in arguments.items():
            sentence = sentence.replace(field, argument)
        raise UserError(sentence) from error

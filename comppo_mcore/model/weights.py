"""The policy's weights as a Megatron checkpoint (`torch_dist`), which loads at any TP and PP.

A checkpoint of a training run holds the same tensors under the same names, beside the critic's and the
optimizer's. `save` adds config and tokenizer of the Hugging Face model, so that its checkpoint can become a
Hugging Face folder again without the one it came from.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from comppo_mcore.errors import UserError
from comppo_mcore.model.checkpoint import first_problem, whole_or_not_at_all
from comppo_mcore.model.hf import side_files
from comppo_mcore.model.hf_table import TensorSpec, differences
from comppo_mcore.model.parallel import Layout, gather_objects
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.model.shims import cuda_as_cpu

HF_FILES = "hf"  # folder inside a checkpoint
_NOT_WEIGHTS = ("critic.", "optimizer.", "chained_", "rng_state", "rerun_state")  # beside the policy's
_VOCABULARIES = ("embedding.word_embeddings.weight", "output_layer.weight")


def save(model: PolicyModel, layout: Layout, template: Path, out: Path) -> None:
    """Write a checkpoint folder, whole or not at all; collective over the world.

    Args:
        model: without a critic.
        template: HF folder whose config and tokenizer go along.
        out: must not exist.

    Raises:
        UserError: on the rank that could not write.
    """
    try:
        with whole_or_not_at_all(out, layout) as partial:
            with cuda_as_cpu():
                dist_checkpointing.save({"model": _sharded(model, layout)}, str(partial))
            if layout.rank == 0:
                (partial / HF_FILES).mkdir()
                for path in side_files(template):
                    shutil.copyfile(path, partial / HF_FILES / path.name)
    except (Exception, CheckpointException) as error:  # Megatron tells in its log what the system said
        free = shutil.disk_usage(_existing(out)).free >> 20
        raise UserError(
            f"checkpoint {str(out)!r} could not be written ({_one_line(error)}); {free} MiB are free there"
        ) from error


@torch.no_grad()
def load(model: PolicyModel, layout: Layout, path: Path) -> None:
    """Fill a model without critic from a checkpoint written at any layout; collective over the world.

    Padding of the vocabulary is cut or added as the layout needs. A checkpoint without our manifest, such as
    one of Megatron-LM, is taken as it is.

    Raises:
        UserError: the checkpoint is damaged or holds other weights than the model, which are listed.
    """
    problem = first_problem(path, layout) if _is_ours(path) else None
    if problem is not None:
        raise UserError(f"checkpoint {str(path)!r} is damaged ({problem}): give another, or make it again")
    with cuda_as_cpu():
        wanted = _sharded(model, layout)
        _check_weights(path, wanted, model.true_vocab_size)
        state = _read(path, {n: x for n, x in wanted.items() if not n.endswith("_extra_state")})
    model.load_state_dict(state, strict=False)  # Megatron's extra states are empty


def contents(path: Path) -> dict[str, TensorSpec]:
    """Every weight of the policy in a checkpoint, by Megatron's name, with all layers in one.

    Raises:
        UserError: the folder is no checkpoint of Megatron, or its index cannot be read.
    """
    if not (path / ".metadata").is_file() or not dist_checkpointing.check_is_distributed_checkpoint(path):
        inside = _newest_inside(path)
        hint = f"; did you mean {str(inside)!r}?" if inside else ""
        raise UserError(f"{str(path)!r} is not a Megatron checkpoint with .metadata and metadata.json{hint}")
    try:
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # it is a pickle, which can fail in any way
        raise UserError(
            f"checkpoint {str(path)!r} has an unreadable .metadata: {_one_line(error)}"
        ) from error
    return {
        name: TensorSpec(tuple(entry.size), entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(_NOT_WEIGHTS)
    }


def dtype_of(path: Path) -> torch.dtype:
    """The one dtype of a checkpoint's weights.

    Raises:
        UserError: see `contents`; or there are several.
    """
    dtypes = {spec.dtype for spec in contents(path).values()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "no dtype"
        raise UserError(
            f"checkpoint {str(path)!r} holds weights in {listed}; float32 or bfloat16 throughout is supported"
        )
    return dtypes.pop()


def _sharded(model: PolicyModel, layout: Layout) -> dict[str, Any]:
    return model.sharded_state_dict(prefix="", metadata={"dp_cp_group": layout.groups.dp_cp})


def _check_weights(path: Path, wanted: dict[str, Any], vocab_size: int) -> None:
    """The stages' tensors together must be those of the checkpoint."""
    built = dict(wanted)
    apply_factories(built)
    mine = {x.key: tuple(x.global_shape) for x in nested_values(built) if isinstance(x, ShardedTensor)}
    model = {name: shape for part in gather_objects(mine) for name, shape in part.items()}
    stored = {name: spec.shape for name, spec in contents(path).items()}
    difference = differences(_unpadded(model, vocab_size), _unpadded(stored, vocab_size))
    if difference:
        raise UserError(f"checkpoint {str(path)!r} holds other weights than config.json says ({difference})")


def _unpadded(shapes: dict[str, tuple[int, ...]], vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes without the vocabulary's padding, which depends on the layout that wrote them."""
    cut = {name: shapes[name] for name in _VOCABULARIES if name in shapes}
    return shapes | {name: (min(rows, vocab_size), *rest) for name, (rows, *rest) in cut.items()}


def _read(path: Path, wanted: dict[str, Any]) -> Any:
    try:
        return dist_checkpointing.load(wanted, str(path), strict=StrictHandling.ASSUME_OK_UNEXPECTED)
    except (Exception, CheckpointException) as error:  # pickle, torch and Megatron have each their own
        raise UserError(f"checkpoint {str(path)!r} cannot be read: {_one_line(error)}") from error


def _is_ours(path: Path) -> bool:
    return any((path / name).exists() for name in (HF_FILES, "trainer.json", "manifest.json"))


def _newest_inside(path: Path) -> Path | None:
    """The last checkpoint of a run folder, which is what was probably meant."""
    found = sorted(p for depth in ("*", "*/*") for p in path.glob(f"{depth}/.metadata"))
    return found[-1].parent if found else None


def _existing(path: Path) -> Path:
    """The folder that `path` would be written into, or the nearest above it that is there."""
    return next(parent for parent in path.absolute().parents if parent.exists())


def _one_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # of several ranks, with the traces of their calls
        return "; ".join(_one_line(failure) for failure, _ in error.failures.values())
    return " ".join(str(error).split()) or type(error).__name__

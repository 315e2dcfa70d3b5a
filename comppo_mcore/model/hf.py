"""Import of a Hugging Face folder into a Megatron model, export as a stream, and saving as a folder.

What is called what and laid out how is in `hf_table`; here is the movement: slices of files into
shards, shards over the tensor-parallel group into full tensors, full tensors over the pipeline.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from comppo_mcore.errors import UserError
from comppo_mcore.model.hf_table import (
    EMBEDDING,
    HEAD,
    TIED_HEAD,
    Held,
    Manifest,
    MegatronModel,
    Stream,
    TensorSpec,
    assemble,
    check_stream,
    differences,
    fuse,
    held,
    hf_manifest,
    part_of,
    shortened,
)

DERIVED = "rotary_emb.inv_freq"  # a buffer that old Llama files carry; recomputed from the config
DTYPES = {"F32": "fp32", "BF16": "bf16"}  # safetensors' names, the configuration's
SHARD_BYTES = 5_000_000_000
SIDE_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
INDEX = "model.safetensors.index.json"


# ---------------------------------------------------------------------------- import


@torch.no_grad()
def import_hf(model: MegatronModel, folder: str | Path) -> None:
    """Fill a Megatron model from a folder of safetensors, reading this rank's slices only.

    Rows of vocabulary padding become zero. Parameters named `critic` are left alone.

    Raises:
        UserError: no or unreadable weight files; names or shapes other than config.json's.
        ValueError: the model was not built from this folder's config.
    """
    manifest = hf_manifest(folder)
    with contextlib.ExitStack() as stack:
        slices = _open_weights(Path(folder), stack)
        _check_folder(folder, slices, manifest)
        for entry in held(model):
            _fill(entry, [slices[name] for name in entry.names], model)
            if entry.names == (EMBEDDING,) and HEAD in slices and HEAD not in manifest:
                _check_tied_copy(folder, entry, slices[HEAD], model.pg_collection.tp)


def stored_dtype(folder: str | Path) -> str:
    """The dtype of a folder's weights, as the field `model.dtype` says it.

    Raises:
        UserError: they are of another dtype than fp32 and bf16, or not all of one.
    """
    with contextlib.ExitStack() as stack:
        dtypes = {slice.get_dtype() for slice in _open_weights(Path(folder), stack).values()}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        raise UserError(
            f"model.dtype is not given and model.path {str(folder)!r} holds weights in "
            f"{', '.join(sorted(dtypes)) or 'no dtype'}: set it to fp32 or bf16"
        )
    return DTYPES[dtypes.pop()]


def _fill(entry: Held, sources: Sequence[Any], model: MegatronModel) -> None:
    parameter, group = entry.parameter, model.pg_collection.tp
    parts = [_rank_slice(source, entry, group) for source in sources]
    value = fuse(parts, model.config.num_query_groups // group.size())
    if entry.rule.padded:
        value = torch.cat([value, value.new_zeros(len(parameter) - len(value), *value.shape[1:])])
    if value.shape != parameter.shape:
        raise ValueError(f"{entry.names} make {tuple(value.shape)}, the model holds {tuple(parameter.shape)}")
    parameter.copy_(value)


def _rank_slice(source: Any, entry: Held, group: Any) -> torch.Tensor:
    """This tensor-parallel rank's part of one HF tensor; of the vocabulary it may be short or empty."""
    axis = entry.rule.axis
    if axis is None:
        return source[:]
    extent = source.get_shape()[axis]
    share = len(entry.parameter) if entry.rule.padded else extent // group.size()
    begin, end = (min(rank * share, extent) for rank in (group.rank(), group.rank() + 1))
    return source[begin:end] if axis == 0 else source[:, begin:end]


def _open_weights(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Name → lazily read slice, over one safetensors file or those of an index."""
    slices: dict[str, Any] = {}
    for path in _weight_files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.path needs {path}, which cannot be read: {error}") from error
    return slices


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(
            f"model.path {str(folder)!r} holds neither {single.name} nor {INDEX}; "
            "give a folder with weights or, to train from nothing, set model.weights to random"
        )
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model.path needs {index}, which is no index of weights: {error!r}") from error


def _check_folder(folder: str | Path, slices: Mapping[str, Any], manifest: Manifest) -> None:
    tolerated = {HEAD} - manifest.keys()  # a tied model's second copy, compared when it is read
    found = {
        name: tuple(tensor.get_shape())
        for name, tensor in slices.items()
        if not name.endswith(DERIVED) and name not in tolerated
    }
    difference = differences({name: spec.shape for name, spec in manifest.items()}, found)
    if difference:
        raise UserError(
            f"model.path {str(folder)!r} does not hold the weights of its config.json ({difference})"
        )


def _check_tied_copy(folder: str | Path, entry: Held, head: Any, group: Any) -> None:
    """Some folders store the output layer of a tied model as well; it must be the embedding."""
    copy = _rank_slice(head, entry, group).to(entry.parameter)
    if not torch.equal(copy, entry.parameter[: len(copy)]):
        raise UserError(
            f"model.path {str(folder)!r} has tie_word_embeddings true but an lm_head.weight that differs "
            "from the embedding; set tie_word_embeddings to false in its config.json or remove the tensor"
        )


# ---------------------------------------------------------------------------- export


def export_hf(model: MegatronModel, manifest: Manifest) -> Stream:
    """Stream the full HF tensors, in the manifest's order, to every rank.

    Collective over the model's tensor- and pipeline-parallel groups: all their ranks must consume
    the whole stream. Each tensor is fresh memory on the parameters' device, in the manifest's dtype.
    Beside it the export needs at most one rank's share of it, and nothing once the next is asked for.

    Raises:
        ValueError: on every rank alike and before the first tensor, if the stages together do not
            hold each name of the manifest exactly once in its shape.
    """
    return check_stream(_export(model, manifest), manifest)


@torch.no_grad()
def _export(model: MegatronModel, manifest: Manifest) -> Stream:
    stages = model.pg_collection.pp
    entries = {entry.names: entry for entry in held(model) if entry.rule is not TIED_HEAD}
    device = next(parameter for _, parameter in model.named_parameters()).device
    for owner, names in _plan(model, list(entries.values()), manifest):
        for i, name in enumerate(names):
            spec = manifest[name]
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            if owner == stages.rank():
                _gather(tensor, entries[names], i, model)
            if stages.size() > 1:
                dist.broadcast(tensor, group=stages, group_src=owner)
            yield name, tensor
            del tensor  # before the next one is made


def _gather(tensor: torch.Tensor, entry: Held, index: int, model: MegatronModel) -> None:
    """Fill a full HF tensor from every rank's share, without the rows of vocabulary padding.

    One broadcast for each share, into its place if that is contiguous; an all-gather would need the
    whole tensor a second time.
    """
    group, axis = model.pg_collection.tp, entry.rule.axis
    part = part_of(entry, index, entry.parameter.detach(), model.config, group.size())
    if axis is None or group.size() == 1:
        tensor.copy_(part[: len(tensor)])
        return
    share = part.shape[axis]
    for rank in range(group.size()):
        begin = min(rank * share, tensor.shape[axis])
        place = tensor.narrow(axis, begin, min(share, tensor.shape[axis] - begin))
        piece = (
            place
            if place.is_contiguous()
            else torch.empty(place.shape, dtype=place.dtype, device=place.device)
        )
        if rank == group.rank():
            piece.copy_(part.narrow(axis, 0, place.shape[axis]))
        dist.broadcast(piece, group=group, group_src=rank)
        if piece is not place:
            place.copy_(piece)


def _plan(
    model: MegatronModel, entries: Sequence[Held], manifest: Manifest
) -> list[tuple[int, tuple[str, ...]]]:
    """Which stage sends which HF tensors, in the manifest's order.

    Every stage learns what all hold before the first tensor moves, so that a difference from the
    manifest raises everywhere instead of leaving some ranks in a broadcast.
    """
    group = model.pg_collection.pp
    stages: list[dict[tuple[str, ...], list[tuple[int, ...]]]] = [{}] * group.size()
    dist.all_gather_object(stages, {e.names: _full_shapes(e, model, manifest) for e in entries}, group=group)
    difference = Counter((name, spec.shape) for name, spec in manifest.items())
    difference.subtract(
        (name, shape)
        for stage in stages
        for names, shapes in stage.items()
        for name, shape in zip(names, shapes, strict=True)
    )
    wrong = {name for (name, _), count in difference.items() if count}
    if wrong:
        raise ValueError(f"the Megatron model and the HF manifest differ in {shortened(wrong)}")
    position = {name: i for i, name in enumerate(manifest)}
    sends = [(owner, names) for owner, stage in enumerate(stages) for names in stage]
    return sorted(sends, key=lambda send: position[send[1][0]])


def _full_shapes(entry: Held, model: MegatronModel, manifest: Manifest) -> list[tuple[int, ...]]:
    """Shapes of the assembled HF tensors without padding, found by assembling tensors without memory."""
    shards = [entry.parameter.to("meta")] * model.pg_collection.tp.size()
    parts = assemble(entry, shards, model.config)
    if entry.rule.padded and entry.names[0] in manifest:
        parts = [part[: manifest[entry.names[0]].shape[0]] for part in parts]
    return [tuple(part.shape) for part in parts]


# ---------------------------------------------------------------------------- save


def save_hf(
    model: MegatronModel,
    template: str | Path,
    out: str | Path,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a HF folder: the model's weights with the template's config and tokenizer.

    Collective over all ranks; rank 0 writes, in files of at most `shard_bytes` where tensors allow.
    The folder appears complete or not at all; one that exists is replaced. `dtype` is that of the weights,
    the template's by default, and is entered into the config.

    Raises:
        OSError: on every rank, when rank 0 could not write.
    """
    manifest = hf_manifest(template, dtype)
    stream = export_hf(model, manifest)
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            _write_folder(stream, _weight_plan(manifest, shard_bytes), Path(template), Path(out), dtype)
        except (OSError, SafetensorError) as error:
            outcome = [str(error)]
    for _ in stream:  # ranks that do not write, or no longer can, still take part in the collectives
        pass
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise OSError(f"the HF folder {str(out)!r} could not be written: {outcome[0]}")


def _write_folder(
    stream: Stream, files: Mapping[str, list[str]], template: Path, out: Path, dtype: torch.dtype | None
) -> None:
    partial, previous = (out.with_name(f".{out.name}.{state}") for state in ("partial", "previous"))
    for leftover in (partial, previous):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for path in side_files(template):
            shutil.copyfile(path, partial / path.name)
        if dtype is not None:
            _enter_dtype(partial / "config.json", dtype)
        _write_weights(stream, files, partial)
        for path in (*partial.iterdir(), partial):
            _fsync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if out.exists():
        out.rename(previous)
    partial.rename(out)
    _fsync(out.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _enter_dtype(config: Path, dtype: torch.dtype) -> None:
    raw, name = json.loads(config.read_text(encoding="utf-8")), str(dtype).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"  # the older and the newer name
    if raw.get(key) != name:
        text = json.dumps(raw | {key: name}, indent=2, ensure_ascii=False)
        config.write_text(text + "\n", encoding="utf-8")


def side_files(template: Path) -> Iterable[Path]:
    """Config and tokenizer, not the index of the template's own weights."""
    return (p for pattern in SIDE_FILES for p in template.glob(pattern) if not p.name.endswith(".index.json"))


def _write_weights(stream: Stream, files: Mapping[str, list[str]], folder: Path) -> None:
    total = 0
    for file, names in files.items():
        tensors = {name: tensor.cpu() for name, tensor in (next(stream) for _ in names)}
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _weight_plan(manifest: Manifest, limit: int) -> dict[str, list[str]]:
    """File → names: the manifest cut, in order, into files of at most `limit` bytes."""
    shards: list[list[str]] = []
    room = 0
    for name, spec in manifest.items():
        if not shards or _num_bytes(spec) > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= _num_bytes(spec)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards)}


def _num_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

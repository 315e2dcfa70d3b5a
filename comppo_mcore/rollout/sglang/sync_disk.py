"""The weights as a folder of safetensors, written tensor by tensor, for servers that share a filesystem."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from comppo_mcore.errors import UserError
from comppo_mcore.model.hf_table import Manifest, Stream
from comppo_mcore.rollout.sglang.sync_buckets import Piece, as_bytes, expect, plan

FILE_BYTES = 5_000_000_000
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_folder(
    stream: Stream, manifest: Manifest, folder: Path, look: Callable[[str, torch.Tensor], None]
) -> int:
    """Write the stream; the folder appears whole or not at all.

    Returns:
        Bytes of weights.

    Raises:
        UserError: it could not be written.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    files = plan(manifest, FILE_BYTES)
    try:
        remove(partial)
        remove(folder)
        partial.mkdir(parents=True)
        for number, pieces in enumerate(files):
            with (partial / f"model-{number + 1:05d}-of-{len(files):05d}.safetensors").open("wb") as file:
                _write_file(stream, pieces, file, look)
        partial.rename(folder)
    except OSError as error:
        remove(partial)
        raise UserError(
            f"rollout.sglang.transport 'disk' could not write the weights to {str(folder)!r}: "
            f"{error.strerror or error}; make room, or set it to broadcast"
        ) from error
    return sum(pieces[-1].end for pieces in files)


def remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _write_file(
    stream: Stream, pieces: tuple[Piece, ...], file: IO[bytes], look: Callable[[str, torch.Tensor], None]
) -> None:
    """One safetensors file: the length of the header, the header, the tensors' bytes."""
    header = _header(pieces)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for piece in pieces:
        tensor = expect(stream, piece).cpu()
        look(piece.name, tensor)
        file.write(as_bytes(tensor).numpy().data)
        del tensor
    file.flush()
    os.fsync(file.fileno())


def _header(pieces: tuple[Piece, ...]) -> bytes:
    entries = {
        piece.name: {
            "dtype": DTYPES[piece.spec.dtype],
            "shape": list(piece.spec.shape),
            "data_offsets": [piece.begin, piece.end],
        }
        for piece in pieces
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return text + b" " * (-len(text) % 8)  # so that the tensors' bytes are aligned

"""Full weights, one tensor at a time, gathered into buckets of raw bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from comppo_mcore.model.hf_table import Manifest, Stream, TensorSpec

Allocate = Callable[[int], torch.Tensor]  # bytes → uint8 [bytes]


@dataclass(frozen=True)
class Piece:
    """One tensor's place in a bucket."""

    name: str
    spec: TensorSpec
    begin: int  # bytes
    end: int


@dataclass(frozen=True)
class Bucket:
    """Whole tensors, byte behind byte."""

    pieces: tuple[Piece, ...]
    data: torch.Tensor  # uint8 [bytes]


def num_bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def plan(manifest: Manifest, limit: int) -> list[tuple[Piece, ...]]:
    """The manifest cut, in order, into buckets of at most `limit` bytes; a larger tensor is alone in its own.

    A tensor whose place would not be a multiple of its item size begins a new bucket, because receivers look
    at the bytes where they are.
    """
    buckets: list[tuple[Piece, ...]] = []
    for name, spec in manifest.items():
        size = num_bytes(spec)
        begin = buckets[-1][-1].end if buckets else 0
        if not buckets or begin + size > limit or begin % spec.dtype.itemsize:
            buckets.append(())
            begin = 0
        buckets[-1] += (Piece(name, spec, begin, begin + size),)
    return buckets


def fill(
    stream: Stream,
    pieces: tuple[Piece, ...],
    allocate: Allocate | None,
    look: Callable[[str, torch.Tensor], None],
) -> Bucket:
    """Take the next tensors of the stream, which must be those of `pieces`.

    Args:
        allocate: makes the bucket's memory; None: a tensor that is alone is sent from where it is.
        look: is shown every tensor.

    Raises:
        ValueError: another name, shape or dtype, or the end of the stream. A server would die of a wrong
            shape and say nothing about an unknown name.
    """
    if len(pieces) == 1 and allocate is None:
        tensor = expect(stream, pieces[0])
        look(pieces[0].name, tensor)
        return Bucket(pieces, as_bytes(tensor))
    data: torch.Tensor | None = None
    for piece in pieces:
        tensor = expect(stream, piece)
        look(piece.name, tensor)
        if data is None:
            data = (allocate or _like(tensor))(pieces[-1].end)
        data[piece.begin : piece.end].copy_(as_bytes(tensor))
        del tensor  # before the stream makes the next one
    assert data is not None
    return Bucket(pieces, data)


def peak_bytes(pieces: tuple[Piece, ...], copied: bool) -> int:
    """What a bucket takes beside the model: itself and, if copied, the tensor that is being added to it."""
    largest = max(piece.end - piece.begin for piece in pieces)
    return pieces[-1].end + (largest if copied or len(pieces) > 1 else 0)


def expect(stream: Stream, piece: Piece) -> torch.Tensor:
    """The stream's next tensor, checked."""
    name, tensor = next(stream, (None, None))
    if name is None or tensor is None:
        raise ValueError(f"the stream of weights ended before {piece.name}")
    got = TensorSpec(tuple(tensor.shape), tensor.dtype)
    if name != piece.name or got != piece.spec:
        raise ValueError(f"the stream of weights has {name} {got} where {piece.name} {piece.spec} belongs")
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _like(tensor: torch.Tensor) -> Allocate:
    return lambda size: torch.empty(size, dtype=torch.uint8, device=tensor.device)


class Watched:
    """A stream that can be begun ahead of use, and remembers whether it failed by itself."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ahead: list[tuple[str, torch.Tensor]] = []
        self.failed = False

    def begin(self) -> None:
        """Get the first tensor, and with it the errors that come before it."""
        self._ahead = [next(self)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._ahead:
            return self._ahead.pop()
        try:
            return next(self._stream)
        except StopIteration:
            raise
        except BaseException:
            self.failed = True
            raise

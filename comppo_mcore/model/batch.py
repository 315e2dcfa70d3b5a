"""Packed micro-batches: what one forward pass of the policy reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from comppo_mcore.kernels.shards import owned_rows


@dataclass(frozen=True)
class Sample:
    """One trajectory as the model sees it."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    supports: tuple[tuple[int, ...], ...] | None = None  # per response token, the ids it was drawn from

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed back to back (THD).

    Row t of a response is the packed position that predicts its token t. With `extra_row`, each
    response has one more row, after its last token, whose value bootstraps a truncated response.
    """

    tokens: Tensor  # int64 [t]
    positions: Tensor  # int64 [t], position inside the sequence
    cu_seqlens: Tensor  # int32 [B + 1] (+ 1 with tail padding)
    rows: Tensor  # int64 [R], packed positions
    cu_rows: tuple[int, ...]  # B + 1 offsets into rows
    targets: Tensor  # int64 [R]; 0 at extra rows
    supports: (
        Tensor | None
    )  # int64 [R, M], ids each target was drawn from, −1 behind them; None: not recorded
    prompt_lengths: tuple[int, ...]
    index: tuple[int, ...]  # of each sample in the caller's list

    @property
    def num_samples(self) -> int:
        return len(self.prompt_lengths)

    @cached_property
    def max_seqlen(self) -> int:
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())

    def owned(self, world: int, rank: int) -> Tensor:
        """Indices into `rows` of this tensor-parallel rank's query shard, int64 [R_own]."""
        shares = [
            start + owned_rows(end - start, world, rank)
            for start, end in zip(self.cu_rows[:-1], self.cu_rows[1:], strict=True)
        ]
        return torch.cat(shares).to(self.rows.device)

    @cached_property
    def row_starts(self) -> Tensor:
        """Packed position of the start of each row's sequence, int64 [R]."""
        counts = torch.tensor(
            [b - a for a, b in zip(self.cu_rows[:-1], self.cu_rows[1:], strict=True)], device=self.rows.device
        )
        return self.cu_seqlens[: self.num_samples].to(torch.int64).repeat_interleave(counts)

    def packed_seq_params(self) -> Any:
        from megatron.core.packed_seq_params import PackedSeqParams

        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


def pack(
    samples: Sequence[Sample],
    index: Sequence[int],
    device: torch.device,
    *,
    multiple_of: int = 1,
    extra_row: bool = False,
) -> MicroBatch:
    """Pack `samples[i] for i in index`.

    The tail is padded to `multiple_of` tokens, as sequence parallelism wants, by a sequence of its own.
    """
    tokens: list[int] = []
    positions: list[int] = []
    cu, rows, cu_rows, targets = [0], [], [0], []
    for i in index:
        sample = samples[i]
        start = len(tokens) + len(sample.prompt) - 1
        tokens += [*sample.prompt, *sample.response]
        positions += range(sample.num_tokens)
        rows += range(start, start + len(sample.response) + extra_row)
        targets += [*sample.response, *([0] * extra_row)]
        cu.append(len(tokens))
        cu_rows.append(len(rows))
    if pad := -len(tokens) % multiple_of:
        tokens += [0] * pad
        positions += range(pad)
        cu.append(len(tokens))

    def long(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return MicroBatch(
        tokens=long(tokens),
        positions=long(positions),
        cu_seqlens=torch.tensor(cu, dtype=torch.int32, device=device),
        rows=long(rows),
        cu_rows=tuple(cu_rows),
        targets=long(targets),
        supports=_supports([samples[i] for i in index], extra_row, device),
        prompt_lengths=tuple(len(samples[i].prompt) for i in index),
        index=tuple(index),
    )


def _supports(samples: Sequence[Sample], extra_row: bool, device: torch.device) -> Tensor | None:
    """The recorded supports of all rows; an extra row's is its stand-in target."""
    recorded = [sample.supports is not None for sample in samples]
    if not any(recorded):
        return None
    if not all(recorded):
        raise ValueError("some samples of a micro-batch have recorded supports and others have none")
    rows = [ids for s in samples for ids in [*(s.supports or ()), *([(0,)] * extra_row)]]
    table = torch.full((len(rows), max(map(len, rows))), -1, dtype=torch.int64)
    for row, ids in zip(table, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return table.to(device)

"""Are the weights a server holds those that were sent?

SGLang's `/weights_checker` tells a hash of every parameter of every tensor-parallel rank. On CPUs it is
SHA-256, which is computed here too, so that a server without tensor parallelism is compared parameter by
parameter, bit for bit, and one with it in what every rank holds whole. On GPUs the hash is SGLang's own;
there the servers are compared with each other.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comppo_mcore.rollout.sglang.http import Broken, Refused
from comppo_mcore.rollout.sglang.server import Server
from comppo_mcore.rollout.sglang.sync_buckets import as_bytes

VOCABULARY_PADDING = 64  # SGLang pads the vocabulary to a multiple
HASH_DIGITS = 16  # of SHA-256's 64

Checksums = Sequence[Mapping[str, str]]  # per tensor-parallel rank: parameter → hash

_FUSED = (
    (re.compile(r"\.self_attn\.[qkv]_proj\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
)


class Fingerprint:
    """Hashes of the parameters a server makes of the tensors that are sent; on CPUs only.

    A server stacks q, k, v and gate, up in the order in which they are sent.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}
        self._whole: set[str] = set()  # on every tensor-parallel rank

    def look(self, name: str, tensor: torch.Tensor) -> None:
        has_vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
        if tensor.device.type != "cpu" or (has_vocabulary and len(tensor) % VOCABULARY_PADDING):
            return
        if tensor.dim() == 1:
            self._whole.add(name)
        for pattern, fused in _FUSED:
            name = pattern.sub(fused, name)
        self._hashes.setdefault(name, hashlib.sha256()).update(as_bytes(tensor).numpy())

    def expected(self, tp_size: int) -> dict[str, str]:
        names = self._hashes if tp_size == 1 else self._whole
        return {name: self._hashes[name].hexdigest()[:HASH_DIGITS] for name in names}


async def checksums(server: Server) -> Checksums | None:
    """None from a server too old to tell.

    Raises:
        ServerError: no usable reply.
    """
    try:
        reply = await server.post("/weights_checker", {"action": "checksum"})
    except Refused as error:
        if error.status == 404:
            return None
        raise
    try:
        return [rank["checksums"] for rank in reply["ranks"]]
    except (KeyError, TypeError) as error:
        raise Broken(f"POST {server.url}/weights_checker: a reply that makes no sense ({error!r})") from error


def differences(told: Mapping[str, Checksums], sent: Fingerprint) -> dict[str, str]:
    """URL → what is wrong, for the servers whose weights are not those that were sent.

    Of servers of one tensor-parallel size that differ from each other, those outside the majority are wrong;
    without a majority all are.
    """
    wrong = {url: reason for url, ranks in told.items() if (reason := _difference(ranks, sent))}
    for size in {len(ranks) for ranks in told.values()}:
        prints = {url: repr(ranks) for url, ranks in told.items() if len(ranks) == size and url not in wrong}
        if not prints:
            continue
        common, count = Counter(prints.values()).most_common(1)[0]
        for url, text in prints.items():
            if text != common or 2 * count <= len(prints):
                wrong[url] = f"{url}: its weights' checksums differ from the other servers'"
    return wrong


def _difference(ranks: Checksums, sent: Fingerprint) -> str | None:
    expected = sent.expected(len(ranks))
    for told in ranks:
        compared = expected.keys() & told.keys()
        if expected and not compared:
            return "its checksums name none of the tensors that were sent"
        different = sorted(name for name in compared if told[name] != expected[name])
        if different:
            return f"holds other weights than were sent, first in {different[0]}"
    return None

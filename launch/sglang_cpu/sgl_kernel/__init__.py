"""Stands in for SGLang's compiled kernels, which exist for GPUs and for CPUs with AMX only.

SGLang imports the names below when it starts. They belong to speculative decoding and to moving keys and
values between pools, neither of which a plain CPU server does; calling one raises. What such a server does
call is the hash behind `sampling_seed`: it is here, in torch.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from sglang.srt import batch_invariant_ops
from sglang.srt.arg_groups.choices import (
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)

from sgl_kernel.murmur import murmur_hash32

_UNUSED = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)


def __getattr__(name: str) -> object:
    if name not in _UNUSED:
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's own CPU kernels")

    return missing


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")

# SGLang uses sampling_seed only under --enable-deterministic-inference. It also wants attention from a list,
# and replaces torch's matrix products by GPU kernels that do not depend on the batch. Torch attends to one
# sequence at a time; its products stay, so that on a CPU the seed fixes the draws, but not the last bits of
# what is drawn from.
add_deterministic_attention_backend_choices(["torch_native"])
add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
batch_invariant_ops.enable_batch_invariant_mode = lambda: None

"""Two ranks of which the second never comes to a weight sync; the first prints what it is told.

Usage: absent_rank.py
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from comppo_mcore.config.schema import SGLangConfig
from comppo_mcore.model.hf_table import TensorSpec
from comppo_mcore.rollout.sglang.sync import SyncError, WeightSync

TIMEOUT_S = 1.0


def main() -> None:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        sync = WeightSync(SGLangConfig(sync_timeout_s=TIMEOUT_S), torch.device("cpu"), Path("unused"))
        begin = time.monotonic()
        try:
            sync.update(iter([]), {"a": TensorSpec((1,), torch.float32)}, version=3)
        except SyncError as error:
            print(error)
        assert time.monotonic() - begin < 60 * TIMEOUT_S
        store.set("done", "")
    else:
        store.wait(["done"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

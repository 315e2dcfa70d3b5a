"""Two tensor-parallel ranks: waiting for the first one, and log-probs over recorded supports."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from comppo_mcore.model import parallel
from comppo_mcore.model.policy import support_logprob

PATIENCE_S = 8.0  # of a collective


def patience() -> None:
    """The first rank works for longer than a collective may take."""
    parallel.HEARTBEAT_S = 1.0
    dist.barrier()  # both have started
    distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE_S))

    def work() -> str:
        time.sleep(1.5 * PATIENCE_S)
        return f"from rank {dist.get_rank()}"

    assert parallel.on_first_rank(work) == "from rank 0"
    assert parallel.on_first_rank(lambda: None) is None


def supports() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 10, generator=generator)
    table = torch.tensor([[3, 7, -1], [0, 5, 9], [4, -1, -1], [6, 5, 4]])
    targets = torch.tensor([7, 0, 4, 5])
    size, rank = 5, dist.get_rank()
    part = logits[:, rank * size : (rank + 1) * size].clone().requires_grad_()
    got = support_logprob(part, targets, table, dist.group.WORLD)
    got.backward(torch.arange(1.0, 5.0))
    whole = logits.double().requires_grad_()
    rows = [
        torch.log_softmax(whole[r, [i for i in ids if i >= 0]], 0)[ids.index(target)]
        for r, (ids, target) in enumerate(zip(table.tolist(), targets.tolist(), strict=True))
    ]
    want = torch.stack(rows)
    want.backward(torch.arange(1.0, 5.0).double())
    torch.testing.assert_close(got, want.float())
    assert whole.grad is not None
    torch.testing.assert_close(part.grad, whole.grad[:, rank * size : (rank + 1) * size].float())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    patience()
    supports()
    dist.destroy_process_group()

"""A launching process and its ranks: rank 1 meets a user error while rank 0 waits for it in a collective."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from comppo_mcore import cli, processes
from comppo_mcore.errors import UserError


def meet_error(*_: object) -> int:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise UserError("data.path is 'gone.jsonl', which is not there; give a file")
    dist.all_reduce(torch.zeros(1))
    return 0


def launch_ranks(*_: object) -> int:
    return processes.launch(["train", "any.yaml"], 2, module="tests.workers.user_error")


if __name__ == "__main__":
    cli._run = meet_error if "RANK" in os.environ else launch_ranks
    sys.exit(cli.main(["train", "any.yaml"]))

"""Every compiled op once, in the instruction set of COMPPO_CPU_ISA; saves what was built and the results."""

from __future__ import annotations

import sys

import torch

from comppo_mcore.kernels import compiled, extension
from tests.attention_cases import CASES, run


def main(path: str) -> None:
    built = extension.load()
    case = CASES["gqa_9_3_width_80"]
    stats, top = run(compiled.attention_statistics, case, *case.tensors())
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    learned = [
        normal(50, 21).requires_grad_(),
        normal(50, 21).requires_grad_(),
        normal(60, 75).requires_grad_(),
    ]
    index = torch.randint(-1, 40, (50, 9), generator=generator, dtype=torch.int32)
    pooled, total = compiled.pool_history(
        *learned, index, torch.rand(50, 9, generator=generator), torch.full((50,), 20)
    )
    (pooled.sum() + total.square().sum()).backward()
    cu, mask = torch.tensor([0, 30, 100]), torch.rand(100, generator=generator) < 0.8
    moved = compiled.comp_gae(normal(100), normal(100), normal(100).sigmoid(), cu, mask, 0.9)
    results = [
        stats.mass,
        stats.sum_squares,
        top.weight,
        pooled.detach(),
        *(x.grad for x in learned),
        moved.advantage,
    ]
    torch.save({"built": built, "results": results, "index": top.index}, path)


if __name__ == "__main__":
    main(sys.argv[1])

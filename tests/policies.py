"""Megatron policies filled from tiny Hugging Face folders, and the log-probs of both."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from comppo_mcore.config.model_shape import read_model_shape
from comppo_mcore.config.schema import Config, ParallelConfig
from comppo_mcore.kernels.select import select
from comppo_mcore.model.batch import Sample, pack
from comppo_mcore.model.execution import Work, forward_only
from comppo_mcore.model.factory import build_policy
from comppo_mcore.model.hf import import_hf
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import Pass, PolicyModel
from tests.hf_folders import VOCAB


def parallel_config(**sizes: int) -> ParallelConfig:
    return ParallelConfig.model_validate(sizes)


def imported_policy(folder: Path, layout: Layout, **sizes: int) -> PolicyModel:
    """An fp32 policy with a critic, holding the folder's weights; `sizes` as in `parallel`."""
    policy = new_policy(folder, layout, with_critic=True, **sizes)
    import_hf(policy, folder)
    return policy


def new_policy(folder: Path, layout: Layout, with_critic: bool = False, **sizes: int) -> PolicyModel:
    """The same with random weights."""
    config = Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "fp32"},
            "parallel": sizes,
            "critic": {"layers": 1},
        }
    )
    shape = read_model_shape(folder)
    return build_policy(config, shape, layout, select("reference"), with_critic=with_critic)


def policy_logprobs(
    policy: PolicyModel, layout: Layout, samples: list[Sample], temperature: float = 1.0
) -> list[list[float]]:
    """log_softmax(z/T) of every response token by Megatron; empty but on the last pipeline stage."""
    batch = pack(samples, range(len(samples)), layout.device)
    request = Pass(temperature=temperature)
    records = forward_only(policy, [Work(batch)], request, layout, lambda _, out, __: out.logprob)
    if not records:
        return []
    values = records[0].tolist()
    return [values[a:b] for a, b in zip(batch.cu_rows[:-1], batch.cu_rows[1:], strict=True)]


@torch.no_grad()
def reference_logprobs(folder: Path, samples: list[Sample], temperature: float = 1.0) -> list[list[float]]:
    """The same by transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for sample in samples:
        logits = model(torch.tensor([[*sample.prompt, *sample.response]])).logits[
            0, len(sample.prompt) - 1 : -1
        ]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        rows.append(logprobs[range(len(sample.response)), list(sample.response)].tolist())
    return rows


def probes() -> list[Sample]:
    """The whole next-token distribution behind one prompt, and two longer responses."""
    prompt = tuple(range(3, 12))
    longer = [Sample((5, 130, 7), tuple(range(20, 45))), Sample((90,), tuple(range(100, 110)))]
    return [*(Sample(prompt, (token,)) for token in range(VOCAB)), *longer]


def largest_difference(a: list[list[float]], b: list[list[float]]) -> float:
    assert [len(row) for row in a] == [len(row) for row in b]
    return max(abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))

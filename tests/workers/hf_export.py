"""Import, export, forward, sync and save at TP = 2 and PP = 2; each rank prints its findings as JSON.

Usage: hf_export.py ROOT LAYOUT CASE [LAYOUT CASE ...]; ROOT holds the HF folders, named by case.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from comppo_mcore.model import parallel
from comppo_mcore.model.hf import export_hf, save_hf
from comppo_mcore.model.hf_table import TensorSpec, hf_manifest
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.rollout.embedded import EmbeddedEngine
from comppo_mcore.rollout.engine import Sampling
from tests.hf_folders import read_weights
from tests.policies import (
    imported_policy,
    largest_difference,
    parallel_config,
    policy_logprobs,
    probes,
    reference_logprobs,
)

LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2_uneven": {"pp": 2, "last_stage_layers": 3},
}


def examine(folder: Path, policy: PolicyModel, layout: Layout) -> dict[str, Any]:
    manifest, expected = hf_manifest(folder), read_weights(folder)
    received = list(export_hf(policy, manifest))
    ours = policy_logprobs(policy, layout, probes())
    out = folder.with_name(
        f"{folder.name}_{layout.tp_size}_{layout.pp_size}_{policy.config.num_layers}_saved"
    )
    save_hf(policy, folder, out)
    return {
        "order": [name for name, _ in received] == list(manifest),
        "exact": all(torch.equal(tensor, expected[name]) for name, tensor in received),
        "logprob_error": largest_difference(ours, reference_logprobs(folder, probes())) if ours else 0.0,
        "padding": padding_sum(policy, layout),
        "saved": all(torch.equal(tensor, expected[name]) for name, tensor in read_weights(out).items()),
        "refused": refusal(policy, manifest),
        "bf16": all(
            torch.equal(tensor, expected[name].bfloat16())
            for name, tensor in export_hf(policy, hf_manifest(folder, torch.bfloat16))
        ),
        "engine_change": engine_change(folder, policy, layout),
    }


def padding_sum(policy: PolicyModel, layout: Layout) -> float:
    """Σ |w| over the rows that pad the vocabulary, on the last tensor-parallel rank."""
    if layout.tp_size == 1 or layout.tp_rank == 0:
        return 0.0
    tables = [
        p for name, p in policy.named_parameters() if "word_embeddings" in name or "output_layer" in name
    ]
    return sum(p[policy.true_vocab_size - len(p) :].abs().sum().item() for p in tables)


def refusal(policy: PolicyModel, manifest: Any) -> str:
    """What an export against a manifest with one name too many says."""
    try:
        next(export_hf(policy, {**manifest, "model.extra.weight": TensorSpec((1,), torch.float32)}))
    except ValueError as error:
        return str(error)
    return ""


def engine_change(folder: Path, policy: PolicyModel, layout: Layout) -> float:
    """Change of the engine's log-prob after a weight of the last rank's last layer is changed by hand."""
    engine = EmbeddedEngine(folder, torch.float32, batch_size=4)
    logprobs = []
    for version in range(2):
        engine.update_weights(export_hf(policy, engine.manifest), version)
        (result,) = engine.generate([[1, 2, 3]], Sampling(max_tokens=1, greedy=True), seed=0)
        logprobs.append(result.logprobs[0])
        if layout.rank == layout.world_size - 1:
            with torch.no_grad():
                last_down_projection(policy).mul_(3.0)
    return abs(logprobs[1] - logprobs[0])


def last_down_projection(policy: PolicyModel) -> torch.nn.Parameter:
    return [p for name, p in policy.named_parameters() if name.endswith("mlp.linear_fc2.weight")][-1]


def main(root: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    findings = {}
    layout = parallel.initialize(parallel_config(tp=2), seed=0)
    for name, case in zip(cases[::2], cases[1::2], strict=True):
        layout = parallel.regroup(parallel_config(**LAYOUTS[name]), seed=0)
        policy = imported_policy(root / case, layout, **LAYOUTS[name])
        findings[f"{name} {case}"] = examine(root / case, policy, layout)
    print(json.dumps(findings))
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

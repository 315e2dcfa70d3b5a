"""Give one server the weights of two checkpoints in turn, from two ranks, over every transport.

Usage: weight_sync.py URL FIRST SECOND; the first rank prints its findings as JSON. The server holds FIRST.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import warnings
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from comppo_mcore.config.schema import SGLangConfig
from comppo_mcore.model import parallel
from comppo_mcore.model.hf import export_hf, import_hf
from comppo_mcore.model.hf_table import hf_manifest
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.rollout.engine import Sampling
from comppo_mcore.rollout.sglang.server import Server
from comppo_mcore.rollout.sglang.sync import WeightSync
from tests.hf_folders import VOCAB
from tests.policies import imported_policy, parallel_config
from tests.sglang_fixtures import reference_logprobs

LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}
TRANSPORTS = ("broadcast", "tensor", "disk")
PROMPT = (3, 9, 27, 81)
SMALL_BUCKET = {"bucket_mb": 0.125}  # less than the configuration allows, for a tiny model in several


class Talk:
    """The first rank's server and event loop."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.server = Server(url, vocab_size=VOCAB, request_timeout_s=60, sync_timeout_s=60)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(90)

    def differences(self, version: int, *folders: Path) -> list[float]:
        """Largest |server − transformers| log-prob of a response, for the weights of each folder."""
        response = self.run(self.server.generate(PROMPT, Sampling(max_tokens=16), rid=f"after-{version}"))
        assert set(response.versions) == {version}
        return [
            max(
                abs(ours - theirs)
                for ours, theirs in zip(
                    response.logprobs, reference_logprobs(folder, PROMPT, response.token_ids), strict=True
                )
            )
            for folder in folders
        ]


def sync_in_turn(
    policy: PolicyModel, layout: Layout, talk: Talk | None, folders: tuple[Path, Path], first_version: int
) -> list[dict[str, Any]]:
    """Six syncs: of each transport the second checkpoint and then the first."""
    findings, version, manifest = [], first_version, hf_manifest(folders[0])
    for transport in TRANSPORTS:
        config = SGLangConfig(transport=transport, sync_timeout_s=60).model_copy(update=SMALL_BUCKET)
        with tempfile.TemporaryDirectory() as folder:
            sync = WeightSync(config, layout.device, Path(folder), talk and talk.loop)
            for new, old in (folders[::-1], folders):
                import_hf(policy, new)
                version += 1
                servers = [talk.server] if talk else []
                report = sync.update(export_hf(policy, manifest), manifest, version, servers)
                found = {"transport": transport, "failed": report.failed, "buckets": report.num_buckets}
                if talk:
                    found["new"], found["old"] = talk.differences(version, new, old)
                findings.append(found)
            sync.disconnect()
    return findings


def main(url: str, first: Path, second: Path) -> None:
    warnings.simplefilter("ignore")
    layout = parallel.initialize(parallel_config(tp=2), seed=0)
    talk = Talk(url) if layout.rank == 0 else None
    findings = {}
    for number, (name, sizes) in enumerate(LAYOUTS.items()):
        layout = parallel.regroup(parallel_config(**sizes), seed=0)
        policy = imported_policy(first, layout, **sizes)
        findings[name] = sync_in_turn(policy, layout, talk, (first, second), first_version=100 * number)
    print(json.dumps(findings))
    parallel.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

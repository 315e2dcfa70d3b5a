"""Weight sync into a real SGLang server: bytes, seconds and what the first rank needs beside the model.

    python benchmarks/weight_sync.py [--check] [--json FILE]

Two trainer ranks (TP = 2) on CPUs, fp32, a random Qwen3 of 172 MB; every transport, and a naive full gather.
Every sync follows a change of all weights, and the server's checksums are compared with what was sent.
Needs Linux, .venv-sglang (launch/sglang_setup.sh), about 5 GiB and two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from comppo_mcore.config.model_shape import read_model_shape
from comppo_mcore.config.schema import Config, SGLangConfig
from comppo_mcore.kernels.select import select
from comppo_mcore.model import parallel
from comppo_mcore.model.factory import build_policy
from comppo_mcore.model.hf import export_hf
from comppo_mcore.model.hf_table import Manifest, hf_manifest
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.rollout.sglang.process import ServerProcesses, plan
from comppo_mcore.rollout.sglang.server import Server
from comppo_mcore.rollout.sglang.sync import SyncReport, WeightSync
from comppo_mcore.rollout.sglang.sync_buckets import num_bytes

MIB = 2**20
BUCKET_MB = 32
ALLOWANCE = 4 * MIB  # of the measured peak: request bodies, thread stacks, pages of libraries
RANKS = 2
TRANSPORTS = ("broadcast", "tensor", "disk")
NAIVE = "naive full gather"
REPEATS = 3  # after one that warms up
MODEL = Qwen3Config(
    vocab_size=16384,  # embedding and output layer of 24 MiB each, the largest tensors
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=14,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Line:
    """One transport: medians of time, the largest peak."""

    transport: str
    num_bytes: int
    num_buckets: int
    seconds: float
    frozen_seconds: float
    peak_bytes: int  # resident memory beyond that before the sync
    peak_accounted: int  # bucket and tensor

    @property
    def row(self) -> str:
        numbers = (
            f"{self.num_bytes / MIB:.0f}",
            f"{self.num_buckets}",
            f"{self.seconds:.2f}",
            f"{self.frozen_seconds:.2f}",
            f"{self.peak_bytes / MIB:.1f}",
            f"{self.peak_accounted / MIB:.1f}",
        )
        return f"| {self.transport} | {' | '.join(numbers)} |"


# ---------------------------------------------------------------- a trainer's rank


def resident_kibibytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


def extra_bytes(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and its peak of resident memory beyond what there was before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
    before = resident_kibibytes("VmRSS")
    result = work()
    return result, 1024 * (resident_kibibytes("VmHWM") - before)


class Rank:
    """A trainer's rank with its part of the model; the first one talks to the server."""

    def __init__(self, url: str, model: Path, folder: Path) -> None:
        config = Config.model_validate(
            {
                "model": {"path": str(model), "weights": "random", "dtype": "fp32"},
                "parallel": {"tp": RANKS},
            }
        )
        self.layout = parallel.initialize(config.parallel, seed=0)
        self.policy: PolicyModel = build_policy(
            config, read_model_shape(model), self.layout, select("reference"), with_critic=False
        )
        self.manifest: Manifest = hf_manifest(model)
        self.folder = folder
        self.version = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.servers: list[Server] = []
        if self.layout.rank == 0:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()
            server = Server(url, vocab_size=MODEL.vocab_size, request_timeout_s=60, sync_timeout_s=120)
            self.servers = [server]

    def line(self, name: str) -> Line:
        """Measured on this rank; that of the first one counts."""
        is_naive = name == NAIVE
        transport = "broadcast" if is_naive else name
        bucket = 10_000 if is_naive else BUCKET_MB
        config = SGLangConfig.model_validate({"transport": transport, "bucket_mb": bucket})
        sync = WeightSync(config, self.layout.device, self.folder, self.loop)
        send = self._send_whole if is_naive else self._send
        self._once(lambda: send(sync))
        runs = [self._once(lambda: send(sync)) for _ in range(REPEATS)]
        sync.disconnect()
        report = runs[0][0]
        whole = report.num_bytes if is_naive else 0
        return Line(
            name,
            report.num_bytes,
            report.num_buckets,
            sorted(seconds for _, seconds, _ in runs)[REPEATS // 2],
            sorted(report.frozen_seconds for report, _, _ in runs)[REPEATS // 2],
            max(peak for _, _, peak in runs),
            whole + report.peak_bytes,
        )

    def _once(self, send: Callable[[], SyncReport]) -> tuple[SyncReport, float, int]:
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.mul_(1.01)
        self.version += 1
        dist.barrier()
        begin = time.monotonic()
        report, peak = extra_bytes(send)
        seconds = time.monotonic() - begin
        if report.failed:
            raise RuntimeError(f"the server did not take the weights: {report.failed}")
        return report, seconds, peak

    def _send(self, sync: WeightSync) -> SyncReport:
        stream = export_hf(self.policy, self.manifest)
        return sync.update(stream, self.manifest, self.version, self.servers)

    def _send_whole(self, sync: WeightSync) -> SyncReport:
        """Gather the whole state dict on the first rank, then send it as one message."""
        whole = [pair for pair in export_hf(self.policy, self.manifest) if self.layout.rank == 0]
        return sync.update(iter(whole), self.manifest, self.version, self.servers)


def run_rank(url: str, model: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    rank = Rank(url, model, out)
    lines = [asdict(rank.line(name)) for name in (*TRANSPORTS, NAIVE)]
    (out / f"lines-{rank.layout.rank}.json").write_text(json.dumps(lines))
    parallel.shutdown()


# ---------------------------------------------------------------- the benchmark


def measure(server_tp: int) -> list[list[Line]]:
    """The lines of each trainer rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        AutoModelForCausalLM.from_config(MODEL, dtype=torch.float32).save_pretrained(model)
        launches = plan(
            SGLangConfig(tp=server_tp), model, dtype="fp32", max_context=512, seed=0, folder=folder, gpus=()
        )
        servers = ServerProcesses(launches, start_timeout_s=300)
        try:
            asyncio.run(servers.start())
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={RANKS}",
            ]
            words = [__file__, "--rank", servers.urls[0], str(model), str(folder)]
            # A fixed threshold, so that freed tensors are given back and the peak is that of one sync.
            fixed = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
            subprocess.run([*torchrun, *words], check=True, env=os.environ | fixed, timeout=600)
        finally:
            servers.stop()
        files = [folder / f"lines-{rank}.json" for rank in range(RANKS)]
        return [[Line(**line) for line in json.loads(file.read_text())] for file in files]


def table(lines: list[Line]) -> str:
    head = "| transport | MiB | buckets | s | s frozen | peak MiB, measured | peak MiB, accounted |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(line.row for line in lines)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit 1 where a peak is over its limit")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--server-tp", type=int, default=1, help="tensor-parallel ranks of the server")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        url, model, out = arguments.rank
        run_rank(url, Path(model), Path(out))
        return 0
    of_ranks = measure(arguments.server_tp)
    lines, others = of_ranks[0], of_ranks[1:]
    largest = max(map(num_bytes, hf_manifest(MODEL, torch.float32).values()))
    limit = BUCKET_MB * MIB + largest
    print(table(lines))
    print(
        f"other ranks: {max(x.peak_bytes for rank in others for x in rank[: len(TRANSPORTS)]) / MIB:.1f} MiB"
    )
    met = True
    for line in lines[: len(TRANSPORTS)]:
        for kind, peak, allowed in (
            ("accounted", line.peak_accounted, limit),
            ("measured", line.peak_bytes, limit + ALLOWANCE),
        ):
            fits = peak <= allowed
            met = met and fits
            sign = "met   " if fits else "MISSED"
            print(f"{sign} {line.transport}, {kind} peak: {peak / MIB:.1f} ≤ {allowed / MIB:.1f} MiB")
    if arguments.json:
        content = {
            "limit": limit,
            "allowance": ALLOWANCE,
            "ranks": [[asdict(x) for x in r] for r in of_ranks],
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(arguments.check and not met)


if __name__ == "__main__":
    sys.exit(main())

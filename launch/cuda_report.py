"""Compiles csrc/cuda with nvcc and checks the machine code. No GPU is needed.

Per file the time; per kernel and architecture its registers, spills, stack, shared memory, the matrix
instructions found, and the local-memory accesses inside its main loop: the innermost loop that holds all of
them. Exits 1 where a kernel that should use tensor cores does not, where a main loop touches local memory, or
where ptxas serialises wgmma.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CUDA = ROOT / "csrc" / "cuda"
OUT = ROOT / "build" / "cuda"
FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-Xptxas=-v", "-I", str(ROOT / "csrc" / "include"))
MATRIX = {
    "statistics_wgmma": "HGMMA",
    "statistics": "HMMA",
    "lse_parts": "HMMA",
}  # by kernel, 16-bit elements


@dataclass
class Kernel:
    """What ptxas and the disassembly say of one kernel for one architecture."""

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    spills: int = 0  # bytes stored
    shared: int = 0  # bytes, dynamic
    matrix: str = ""  # HMMA, HGMMA or FFMA in the main loop, and how many
    local_in_loop: int = 0

    def problem(self) -> str | None:
        base = self.name.split("<")[0]
        wanted = MATRIX.get(base)
        if wanted and "<float" not in self.name and not self.matrix.startswith(wanted):
            return f"{self.name} ({self.arch}) has no {wanted}"
        if self.local_in_loop:
            return (
                f"{self.name} ({self.arch}) touches local memory {self.local_in_loop} times in its main loop"
            )
        return None


def architectures(source: Path) -> tuple[str, ...]:
    return ("90a",) if source.stem.endswith("_sm90") else ("80", "90a")


def compile_file(source: Path, arch: str, nvcc: str, cuobjdump: str) -> list[Kernel]:
    """The kernels of a file for one architecture."""
    folder = OUT / f"{source.stem}.sm_{arch}"
    folder.mkdir(exist_ok=True)
    target = folder / f"{source.stem}.cubin"
    code = (f"-gencode=arch=compute_{arch},code=sm_{arch}", "--keep", "--keep-dir", str(folder))
    start = time.time()
    done = subprocess.run(
        [nvcc, *FLAGS, *code, "-cubin", str(source), "-o", str(target)], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
    print(f"{time.time() - start:6.1f} s  {source.name} for sm_{arch}", flush=True)
    log = done.stdout + done.stderr
    if "serialized" in log:
        raise RuntimeError(f"ptxas serialises wgmma in {source.name}:\n{log}")
    kernels, instructions = parse_ptxas(log, f"sm_{arch}"), disassemble(cuobjdump, target)
    shared = dynamic_shared(folder / f"{source.stem}.ptx")
    for kernel in kernels:
        inspect(kernel, instructions[kernel.name])
        kernel.shared = shared[kernel.name]
    return kernels


def parse_ptxas(log: str, arch: str) -> list[Kernel]:
    kernels = []
    for part in log.split("Compiling entry function '")[1:]:
        kernel = Kernel(part.split("'")[0], arch)
        kernel.registers = int(re.search(r"Used (\d+) registers", part).group(1))
        kernel.stack = int(re.search(r"(\d+) bytes stack frame", part).group(1))
        kernel.spills = int(re.search(r"(\d+) bytes spill stores", part).group(1))
        kernels.append(kernel)
    return kernels


def dynamic_shared(ptx: Path) -> dict[str, int]:
    """Bytes by kernel, from the comment that dynamic_shared() of csrc/cuda/isa.cuh leaves in the code."""
    shared = {}
    for part in ptx.read_text().split(".entry ")[1:]:
        found = re.search(r"// dynamic shared memory: (\d+) bytes", part)
        shared[part.split("(")[0].strip()] = int(found.group(1)) if found else 0
    return shared


def demangle(names: list[str]) -> dict[str, str]:
    """Kernel<parameters> without namespaces and arguments."""
    done = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True)
    short = {}
    for name, full in zip(names, done.stdout.splitlines(), strict=True):
        full = full.split("(comppo::")[0].removeprefix("void ")
        full = re.sub(r"\(anonymous namespace\)::|_GLOBAL__N_\w+::|comppo::cuda::", "", full)
        short[name] = full.replace("(int)", "")
    return short


def disassemble(cuobjdump: str, cubin: Path) -> dict[str, list[tuple[int, str]]]:
    """Address and text of every instruction, by mangled kernel name."""
    done = subprocess.run([cuobjdump, "-sass", str(cubin)], capture_output=True, text=True, check=True)
    functions: dict[str, list[tuple[int, str]]] = {}
    for line in done.stdout.splitlines():
        if found := re.search(r"Function : (\S+)", line):
            current = functions.setdefault(found.group(1), [])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            current.append((int(found.group(1), 16), found.group(2)))
    return functions


def main_loop(code: list[tuple[int, str]], opcode: str) -> tuple[int, int] | None:
    """The smallest span of a backward branch that holds every `opcode`."""
    uses = [at for at, text in code if re.search(rf"\b{opcode}\b", text)]
    spans = []
    for at, text in code:
        found = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if found and int(found.group(1), 16) < at:
            spans.append((int(found.group(1), 16), at))
    holding = [(a, b) for a, b in spans if uses and a <= uses[0] and uses[-1] <= b]
    return min(holding, key=lambda span: span[1] - span[0], default=None)


def inspect(kernel: Kernel, code: list[tuple[int, str]]) -> None:
    for opcode in ("HGMMA", "HMMA", "FFMA"):
        count = sum(bool(re.search(rf"\b{opcode}\b", text)) for _, text in code)
        if count:
            span = main_loop(code, opcode) if opcode != "FFMA" else None
            kernel.matrix = f"{opcode} {count}"
            if span:
                inside = [text for at, text in code if span[0] <= at <= span[1]]
                kernel.local_in_loop = sum(bool(re.search(r"\b(LDL|STL)\b", text)) for text in inside)
            return


def find_tool(name: str, near: str) -> str | None:
    """On the path, beside nvcc, or inside an installed triton or CUDA wheel."""
    folders = [Path(near).resolve().parent, OUT / "tools" / "nvidia" / "cu13" / "bin"]
    for site in map(Path, sys.path):
        folders += [site / "triton" / "backends" / "nvidia" / "bin", site / "nvidia" / "cu13" / "bin"]
    found = shutil.which(name)
    return found or next((str(f / name) for f in folders if (f / name).exists()), None)


def fetch_tools() -> None:
    """cuobjdump and nvdisasm from their wheels (5 MB), into build/."""
    packages = ["nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"]
    target = OUT / "tools"
    print("gpu_check: fetching cuobjdump and nvdisasm", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), *packages], check=True)
    for tool in (target / "nvidia" / "cu13" / "bin").iterdir():
        tool.chmod(0o755)


def report(kernels: list[Kernel]) -> list[str]:
    """Prints the table; what is wrong."""
    names = demangle([k.name for k in kernels])
    columns = "registers  spilled  stack  shared  matrix        local memory in main loop"
    print(f"\n{'kernel':34} {'arch':7} {columns}")
    for k in kernels:
        k.name = names[k.name]
        numbers = f"{k.registers:9} {k.spills:8} {k.stack:6} {k.shared:7}  {k.matrix:13} {k.local_in_loop}"
        print(f"{k.name:34} {k.arch:7} {numbers}")
    return [p for k in kernels if (p := k.problem())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvcc", required=True)
    nvcc = parser.parse_args().nvcc
    OUT.mkdir(parents=True, exist_ok=True)
    if find_tool("cuobjdump", nvcc) is None or find_tool("nvdisasm", nvcc) is None:
        fetch_tools()
    cuobjdump = find_tool("cuobjdump", nvcc)
    os.environ["PATH"] = f"{Path(find_tool('nvdisasm', nvcc)).parent}:{os.environ['PATH']}"
    jobs = [(source, arch) for source in sorted(CUDA.glob("*.cu")) for arch in architectures(source)]
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.map(lambda job: compile_file(*job, nvcc, cuobjdump), jobs)
        try:
            kernels = [kernel for of_file in compiled for kernel in of_file]
        except RuntimeError as error:
            sys.exit(f"gpu_check: {error}")
    sys.exit("\n".join(f"gpu_check: {problem}" for problem in report(kernels)) or None)


if __name__ == "__main__":
    main()

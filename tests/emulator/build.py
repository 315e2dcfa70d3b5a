"""Compiles csrc/cuda/*.cu with g++ against the emulator: one shared library per op."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "emulator"
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "emulator"
SOURCES = {
    "comp_gae": ("comp_gae.cu",),
    "pool_history": ("pool_history.cu",),
    "attention_statistics": ("attention_statistics.cu", "attention_statistics_sm90.cu"),
}
FLAGS = (
    *("g++", "-x", "c++", "-std=c++20", "-O1", "-fPIC", "-fno-gnu-unique", "-Wall", "-Wno-unknown-pragmas"),
    *("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error", "-I", str(HERE / "include")),
)
COVERAGE = ("--coverage", "-fprofile-abs-path")


def compile_library(name: str, csrc: Path = CSRC, flags: tuple[str, ...] = (), cache: Path = CACHE) -> Path:
    """The library of one op. What is in `CACHE` and does not depend on changed files is not compiled again.

    Args:
        name: a key of `SOURCES`.
        csrc: where to take the sources from.
        flags: extra ones for the compiler.
        cache: where to leave what is new.
    """
    isa = ("-include", str(_precompiled_isa(flags)))
    device_headers = sorted(csrc.rglob("*.cuh"))
    sources = [csrc / "cuda" / source for source in SOURCES[name]]
    objects = [_object(HERE / "harness.cpp", [], csrc, flags, cache)]
    objects += [_object(source, device_headers, csrc, (*flags, *isa), cache) for source in sources]
    folder = cache / f"{name}-{hashlib.sha256(repr(objects).encode()).hexdigest()[:16]}"
    library = folder / f"{name}.so"
    if not library.exists():
        _run_to(library, "g++", "-shared", *flags, *map(str, objects))
    return library


def _object(source: Path, headers: list[Path], csrc: Path, flags: tuple[str, ...], cache: Path) -> Path:
    key = _digest([*HERE.rglob("*"), *csrc.rglob("*.h"), *headers, source], flags)
    name = Path(f"{source.stem}-{key}") / f"{source.stem}.o"
    for found in (CACHE / name, cache / name):
        if found.exists():
            return found
    _run_to(cache / name, *FLAGS, *flags, "-I", str(csrc / "include"), "-c", str(source))
    return cache / name


def _precompiled_isa(flags: tuple[str, ...]) -> Path:
    """A header that includes isa.cuh, with its precompiled form beside it."""
    folder = CACHE / f"isa-{_digest([*HERE.rglob('*'), CSRC / 'cuda' / 'scalar.cuh'], flags)}"
    header, compiled = folder / "emulated_isa.hpp", folder / "emulated_isa.hpp.gch"
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        header.write_text(f'#include "{HERE / "isa.cuh"}"\n')
        _run_to(compiled, *[word if word != "c++" else "c++-header" for word in FLAGS], *flags, str(header))
    return header


def _digest(paths: list[Path], flags: tuple[str, ...]) -> str:
    """A name for what goes into a compilation: the C++ files among `paths`, and the flags."""
    digest = hashlib.sha256(repr((FLAGS, flags)).encode())
    for path in sorted(paths, key=lambda p: (p.name, str(p))):
        if path.suffix in (".cu", ".cuh", ".h", ".hpp", ".cpp"):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _run_to(target: Path, *command: str) -> None:
    """Runs a compiler; the target appears whole or not at all, whoever else is at the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{os.getpid()}-{threading.get_ident()}{target.suffix}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    partial.rename(target)

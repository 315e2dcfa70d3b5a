"""Builds the compiled ops with CMake (CMakeLists.txt); all else is declared in pyproject.toml.

COMPPO_BUILD=cpu|cuda|off chooses what to compile. The default is cuda where nvcc works and the installed
torch is a CUDA build, and cpu elsewhere. Without the ops (off) the eager reference serves.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def chosen_build() -> str:
    build = os.environ.get("COMPPO_BUILD") or ("cuda" if torch_has_cuda() and nvcc_works() else "cpu")
    if build not in ("cpu", "cuda", "off"):
        sys.exit(f"COMPPO_BUILD is '{build}'; it must be cpu, cuda or off")
    return build


def torch_has_cuda() -> bool:
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        sys.exit("the ops need torch: install it first and use --no-build-isolation, or set COMPPO_BUILD=off")
    version = Path(torch.origin).with_name("version.py").read_text()
    return re.search(r"^cuda\b.*= *['\"]", version, re.MULTILINE) is not None


def nvcc_works() -> bool:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.write_text("__global__ void empty() {}\n")
        return subprocess.run([nvcc, "-c", source, "-o", f"{source}.o"], capture_output=True).returncode == 0


class CMakeBuild(build_ext):
    """One CMake run makes every library, beside the package's modules."""

    def run(self) -> None:
        if not self.extensions:
            return
        cmake = shutil.which("cmake", path=PATH)
        if cmake is None or shutil.which("c++") is None:
            sys.exit(
                "the compiled ops need cmake and a C++20 compiler: install them, or set COMPPO_BUILD=off"
            )
        build = chosen_build()
        folder = ROOT / "build" / build
        output = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve().parent
        generator = ["-G", "Ninja"] if shutil.which("ninja", path=PATH) else []
        options = {"COMPPO_BUILD": build, "COMPPO_OUTPUT": output, "Python_EXECUTABLE": sys.executable}
        defines = [f"-D{name}={value}" for name, value in options.items()]
        environment = {**os.environ, "PATH": PATH}
        subprocess.run([cmake, "-S", ROOT, "-B", folder, *generator, *defines], check=True, env=environment)
        subprocess.run([cmake, "--build", folder], check=True, env=environment)


extensions = [] if chosen_build() == "off" else [Extension("comppo_mcore._host", sources=[])]
setup(ext_modules=extensions, cmdclass={"build_ext": CMakeBuild})

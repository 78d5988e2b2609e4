"""Kernels compiled by clang, and for ARM: bit-identical to those that gcc makes for x86-64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from verbatim import kernels

HASHES = Path(__file__).with_name("hashes.cpp")
REPOSITORY = Path(__file__).parents[2]
ARM = "aarch64-linux-gnu-g++"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64") or "qemu-aarch64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "generic" not in kernels.available(), reason="no generic kernels were built"
    ),
]


def needs(*tools: str) -> pytest.MarkDecorator:
    """Skip a test where tools are missing (Debian: clang, g++-aarch64-linux-gnu, qemu-user-static)."""
    missing = [tool for tool in ("c++", "cmake", *tools) if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compile_kernels(folder: Path, compiler: str, target: str, *options: str) -> Path:
    """Return the library of an instruction set."""
    run(
        "cmake", "-S", REPOSITORY, "-B", folder,
        f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_BUILD_TYPE=Release", *options,
    )  # fmt: skip
    run("cmake", "--build", folder, "--parallel", 2, "--target", target)
    return folder / f"verbatim_{target}.so"


def hashes(program: Path, compiler: str, library: Path, *emulator: str) -> list[str]:
    """Return the hashes of the kernels' results."""
    run(compiler, "-std=c++17", "-O1", HASHES, "-ldl", "-o", program)
    found = run(*emulator, program, library).splitlines()
    assert len(found) > 40
    return found


def installed(name: str) -> Path:
    return Path(kernels.__file__).with_name(f"verbatim_{name}.so")


@needs(ARM, EMULATOR)
def test_arm_kernels_are_bit_identical_to_the_generic_x86_kernels(tmp_path):
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
    library = compile_kernels(tmp_path / "build", ARM, "generic", *system)
    assert [path.name for path in library.parent.glob("verbatim_*.so")] == [library.name]
    emulated = hashes(tmp_path / "there", ARM, library, EMULATOR, "-L", "/usr/aarch64-linux-gnu")
    assert emulated == hashes(tmp_path / "here", "c++", installed("generic"))


@needs("clang++")
@pytest.mark.parametrize("name", sorted({*kernels.available()[:1], *kernels.available()[-1:]}))
def test_clang_and_gcc_kernels_are_bit_identical(tmp_path, name):
    library = compile_kernels(tmp_path / "build", "clang++", name)
    found = hashes(tmp_path / "program", "c++", library)
    assert found == hashes(tmp_path / "program", "c++", installed(name))

"""Kernels compiled for ARM and run under an emulator: bit-identical to the generic x86-64 kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from verbatim import kernels

HASHES = Path(__file__).with_name("hashes.cpp")
REPOSITORY = Path(__file__).parents[2]
CROSS = "aarch64-linux-gnu-g++"  # Debian's packages: g++-aarch64-linux-gnu and qemu-user-static
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
MISSING = [tool for tool in ("c++", "cmake", CROSS) if shutil.which(tool) is None] + (
    [] if EMULATOR else ["qemu-aarch64"]
)


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.skipif("generic" not in kernels.available(), reason="no generic kernels were built")
def test_arm_kernels_are_bit_identical_to_the_generic_x86_kernels(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for compiler, program in (("c++", here), (CROSS, there)):
        run(compiler, "-std=c++17", "-O1", HASHES, "-ldl", "-o", program)
    build = tmp_path / "build"
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
    run(
        "cmake", "-S", REPOSITORY, "-B", build, *system,
        f"-DCMAKE_CXX_COMPILER={CROSS}", "-DCMAKE_BUILD_TYPE=Release",
    )  # fmt: skip
    run("cmake", "--build", build, "--parallel", 2)
    assert [path.name for path in build.glob("verbatim_*.so")] == ["verbatim_generic.so"]

    generic = Path(kernels.__file__).with_name("verbatim_generic.so")
    expected = run(here, generic).splitlines()
    emulated = run(
        EMULATOR, "-L", "/usr/aarch64-linux-gnu", there, build / "verbatim_generic.so"
    ).splitlines()
    assert len(expected) > 40 and emulated == expected

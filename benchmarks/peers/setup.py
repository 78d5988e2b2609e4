"""Create the peers' environment: `python -m benchmarks.peers.setup [--env FOLDER]`.

llama-cpp-python is compiled for this machine's processor, which takes some minutes and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peers.client import ROOT

ENVIRONMENT = Path(os.environ.get("VERBATIM_PEERS", ROOT / "build" / "peers"))
REQUIREMENTS = {
    "llama.cpp": ["llama-cpp-python==0.3.36", "gguf>=0.17", "numpy"],
    "OpenVINO": ["openvino==2026.4.*", "numpy"],
}


def peers_python(environment: Path) -> Path:
    return environment / "bin" / "python"


def pip_line(system: str, environment: Path) -> str:
    """Return the command that installs one system."""
    packages = " ".join(f"'{package}'" for package in REQUIREMENTS[system])
    return f"{peers_python(environment)} -m pip install {packages}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", type=Path, default=ENVIRONMENT)
    parser.add_argument("--systems", nargs="+", choices=REQUIREMENTS, default=list(REQUIREMENTS))
    options = parser.parse_args()
    if not peers_python(options.env).exists():
        venv.create(options.env, with_pip=True)
    for system in options.systems:
        pip = [str(peers_python(options.env)), "-m", "pip", "install", "--quiet"]
        print(f"{system}: {pip_line(system, options.env)}", flush=True)
        # Compiled for this processor: a wheel may be for an older one.
        from_source = ["--no-binary", "llama-cpp-python"] if system == "llama.cpp" else []
        cmake = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"} | dict(os.environ)
        status = subprocess.run([*pip, *from_source, *REQUIREMENTS[system]], env=cmake, check=False)
        if status.returncode:
            sys.exit(f"{system} could not be installed; the benchmark runs without it")


if __name__ == "__main__":
    main()

"""`python -m benchmarks.clients`: the table of clients and cases."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from verbatim import storyteller

HERE = Path(__file__).parent
CLIENTS = sorted(path.stem.removeprefix("with_") for path in (HERE / "cases").glob("with_*.py"))
# In Llama 3's format one call ends an answer; a model that was not trained on tools would not end it.
TEMPLATE = """{%- if tools %}<|im_start|>system
Answer with {"name": "...", "parameters": {}} of {{ tools | tojson }}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_model(folder: Path) -> None:
    """Copy the storyteller, with a chat template that supports tools."""
    shutil.copytree(
        storyteller.path(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def make_environment(folder: Path) -> Path:
    """Return the interpreter of the clients' environment, created if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        requirements = (HERE / "requirements.txt").read_text().split()
        for packages in (requirements[:1], requirements):  # torch first
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run(client: str, python: Path, url: str, model: Path) -> list[dict[str, str]]:
    """Return the outcome of each case of a client."""
    script = HERE / "cases" / f"with_{client}.py"
    process = subprocess.run(
        [str(python), str(script), url, str(model)],
        capture_output=True, text=True, timeout=600, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    lines = [json.loads(line[2:]) for line in process.stdout.splitlines() if line.startswith("> ")]
    return lines or [{"case": "start", "outcome": process.stderr.strip()[-300:]}]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    default = Path(os.environ.get("VERBATIM_CLIENTS", HERE.parents[1] / "build" / "clients"))
    parser.add_argument("--env", type=Path, default=default, help="the clients' environment")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS)
    options = parser.parse_args()
    python = make_environment(options.env)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tales"
        make_model(model)
        verbatim = str(Path(sys.executable).with_name("verbatim"))
        command = [verbatim, "serve", str(model), "--port", "0", "--log-level", "warning"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            match = next(filter(None, (re.search(r"at (http://\S+) ", s) for s in server.stderr)))
            try:
                for client in options.clients:
                    for line in run(client, python, match[1], model):
                        failed += line["outcome"] != "ok"
                        print(f"{client:<18} {line['case']:<40} {line['outcome']}", flush=True)
            finally:
                server.terminate()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

"""lm-evaluation-harness: log-likelihoods by echo, and texts by completions and by chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from case import MODEL, MODEL_PATH, URL, run

TASKS = Path(__file__).parents[1] / "lm_eval_tasks"


def _evaluate(kind: str, endpoint: str, tasks: str, *more: str) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        for file in TASKS.iterdir():
            Path(folder, file.name).write_text(file.read_text().replace("DATA", folder))
        args = f"model={MODEL},base_url={URL}/v1/{endpoint},tokenizer={MODEL_PATH},max_length=1024"
        subprocess.run(
            [
                sys.executable, "-m", "lm_eval", "run", "--model", kind,
                "--model_args", f"{args},tokenizer_backend=huggingface,num_concurrent=2",
                "--tasks", tasks, "--include_path", folder, "--output_path", f"{folder}/out", *more,
            ],
            check=True, capture_output=True, timeout=300,
            env=os.environ | {
                "OPENAI_API_KEY": "none", "HF_HOME": f"{folder}/home", "HF_DATASETS_OFFLINE": "1",
            },
        )  # fmt: skip
        (report,) = Path(folder, "out").rglob("results_*.json")
        results: dict[str, dict[str, float]] = json.loads(report.read_text())["results"]
        return results


def local_completions() -> None:
    found = _evaluate("local-completions", "completions", "verbatim_choice,verbatim_free")
    assert 0 < found["verbatim_choice"]["acc,none"] < 1


def local_chat_completions() -> None:
    found = _evaluate(
        "local-chat-completions", "chat/completions", "verbatim_free", "--apply_chat_template"
    )
    assert "verbatim_free" in found


run(local_completions, local_chat_completions)

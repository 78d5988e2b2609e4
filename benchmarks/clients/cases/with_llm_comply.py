"""`llm-comply` on its three formats, without its cases of images: the model reads only text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from case import MODEL, URL, report

LLM_COMPLY = Path(sys.executable).with_name("llm-comply")
HEADERS = {
    "anthropic": ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]
}

for form in ("openai-chat", "open-responses", "anthropic"):
    done = subprocess.run(
        [
            str(LLM_COMPLY), "--format", form, "--json", "-u", f"{URL}/v1", "-k", "none", "-m", MODEL,
            *HEADERS.get(form, []),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    for result in json.loads(done.stdout)["results"]:
        if "image" not in result["id"]:
            status = result["status"]
            errors = "; ".join(result.get("errors") or [])[:200]
            report(f"{form} {result['id']}", "ok" if status == "passed" else f"{status}: {errors}")

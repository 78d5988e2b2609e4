"""Imports that the commands defer: not done at startup, but available when used."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "torch.distributed.tensor", "scipy", "sympy", "torchao", "accelerate")

OPEN = f"""
import json, sys
from verbatim.cli.deferred import deferred_imports
with deferred_imports():
    import verbatim
    llm = verbatim.LLM()
ids = llm.generate("Once", verbatim.SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids
report = {{"ids": list(ids), "imported": [name for name in {HEAVY} if name in sys.modules]}}
"""
USE = """
import builtins, torch
from transformers import masking_utils
from transformers.distributed import utils
report["import"] = builtins.__import__.__name__
report["dtensor"] = utils.is_dtensor(torch.zeros(1))
with masking_utils.TransformGetItemToIndex() as mode:
    pass
from scipy.optimize import linear_sum_assignment
from torch.distributed.tensor import Shard
report["distributed"] = torch.distributed.is_available() and Shard(1).dim == 1
report["compiled"] = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item()
"""


def run(*parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "\n".join((*parts, "print(json.dumps(report))"))
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def report_of(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_model_opens_without_heavy_imports_which_work_later():
    report = report_of(run(OPEN, USE))
    assert report.pop("imported") == []
    import verbatim

    with verbatim.LLM() as llm:
        params = verbatim.SamplingParams(max_tokens=8, temperature=0)
        ids = list(llm.generate("Once", params)[0].outputs[0].token_ids)
    works = {"import": "__import__", "dtensor": False, "distributed": True, "compiled": 2.0}
    assert report == works | {"ids": ids}


@pytest.mark.slow
def test_installed_torchao_is_not_imported(tmp_path):
    package = tmp_path / "torchao" / "__init__.py"
    package.parent.mkdir()
    package.write_text("import sys\nprint('Failed to load torchao', file=sys.stderr)\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = run(OPEN, PYTHONPATH=path)
    assert report_of(done)["imported"] == [] and done.stderr == ""
    done = run(OPEN, PYTHONPATH=path, VERBATIM_DEFER="0")
    assert "Failed to load torchao" in done.stderr

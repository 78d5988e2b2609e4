"""What `verbatim generate` leaves unimported, and that it is there when it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "sympy")

OPEN = """
import json, sys
from verbatim.cli import deferred
{before}
with deferred.deferred_imports():
    import verbatim
    llm = verbatim.LLM()
ids = llm.generate("Once", verbatim.SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids
report = {{"ids": list(ids), "imported": [name for name in {heavy} if name in sys.modules]}}
"""
USE = """
import __main__, builtins, torch
from transformers import masking_utils
from transformers.distributed import utils
report["import"] = builtins.__import__.__name__
report["dtensor"] = utils.is_dtensor(torch.zeros(1))
with masking_utils.TransformGetItemToIndex() as mode:
    pass
from torch.distributed.tensor import Shard
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, Shard as theirs
report["same"] = isinstance(theirs(0), Shard) and isinstance(Shard(0), theirs) and theirs(1).dim == 1
report["compiled"] = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item()
"""


def run(*parts: str) -> dict:
    code = "\n".join((*parts, "print(json.dumps(report))"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_model_opens_without_the_compiler_and_both_work_afterwards():
    report = run(OPEN.format(before="", heavy=HEAVY), USE)
    assert report.pop("imported") == []
    import verbatim

    with verbatim.LLM() as llm:
        params = verbatim.SamplingParams(max_tokens=8, temperature=0)
        ids = list(llm.generate("Once", params)[0].outputs[0].token_ids)
    assert report == {
        "ids": ids,
        "import": "__import__",
        "dtensor": False,
        "same": True,
        "compiled": 2.0,
    }


@pytest.mark.slow
def test_a_transformers_that_fails_with_deferred_names_is_imported_whole():
    before = "deferred._Placeholder = None  # calling it is an error"
    report = run(OPEN.format(before=before, heavy=HEAVY))
    assert "torch.distributed.tensor" in report["imported"] and len(report["ids"]) == 8

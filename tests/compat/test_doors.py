"""What every door of `verbatim.compat` must keep to: it translates, and the engine generates."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import verbatim.compat

MODEL_CALLS = {
    "forward",
    "run_one_forward_step",
    "multinomial",
    "softmax",
    "log_softmax",
    "argmax",
    "topk",
}
MODEL_NAMES = {"model", "module", "actor"}
STEPS = {"step", "run", "sample", "sample_rows", "draw_rows", "generate", "dummy_forward", "peek"}
LENGTHS = ("max", "num_tokens", "new_tokens", "length")


def names_in(*nodes):
    """Every name and attribute that is read, and every one that is called."""
    inside = [node for root in nodes for node in ast.walk(root)]
    named = {getattr(node, "attr", getattr(node, "id", "")) for node in inside}
    called = {
        getattr(node.func, "attr", getattr(node.func, "id", ""))
        for node in inside
        if isinstance(node, ast.Call)
    }
    return named, called


def sins(source):
    """What a door may not do: call a model, sample by hand, or loop over tokens."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if any(
                f"{start}{alias.name}".startswith("torch.nn.functional") for alias in node.names
            ):
                found.append("functional")
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [f"call of {name}"] * (name in MODEL_CALLS | MODEL_NAMES)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            head = node.test if isinstance(node, ast.While) else node.iter
            named, called = names_in(head)
            if (called | names_in(*node.body)[1]) & STEPS:
                found.append("loop of steps")
            if "range" in called and any(word in name for word in LENGTHS for name in named):
                found.append("loop over tokens")
    return found


DOORS = sorted(Path(verbatim.compat.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", DOORS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_door_has_a_token_loop_or_calls_a_model(path):
    assert sins(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn.functional as F",
        "from torch.nn import functional",
        "y = self.model(ids)",
        "y = model.forward(ids)",
        "y = torch.multinomial(p, 1)",
        "while driver.step(): pass",
        "while True:\n    ids.append(draw_rows(x))",
        "for _ in range(max_new_tokens):\n    pass",
        "for i in range(params.num_tokens_to_generate - 1):\n    pass",
    ],
)
def test_the_rule_for_doors_notices(source):
    assert sins(source)


NOUNS = "batch checks cli compat core errors llm options params protocols tensors text".split()


def test_doors_import_public_names_nouns_and_the_handle():
    nodes = [node for path in DOORS for node in ast.walk(ast.parse(path.read_text()))]
    found = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    found -= {*verbatim._HOMES.values(), "verbatim", "verbatim.engine.handle"}
    inner = {name[9:] for name in found if name.startswith("verbatim.")}
    assert not {name for name in inner if name.split(".")[0] not in NOUNS}


# What programs of the five systems import, without the top-level name.
ORIGINALS = """
coati.models.generation generate generate_streaming _prepare_logits_processor _sample _sample_streaming
flexllmgen.compression CompressionConfig
flexllmgen.flex_opt OptLM Policy CompressionConfig ExecutionEnv run_flexllmgen get_opt_config
flexllmgen.opt_config OptConfig get_opt_config
flexllmgen.pytorch_backend TorchDevice TorchDisk TorchMixedDevice
flexllmgen.utils ExecutionEnv Task str2bool
kempnerforge.model.attention KVCache
kempnerforge.model.generate generate sample
megatron.core.inference.async_stream AsyncStream
megatron.core.inference.common_inference_params CommonInferenceParams
megatron.core.inference.contexts.dynamic_context DynamicInferenceContext
megatron.core.inference.contexts DynamicInferenceContext
megatron.core.inference.inference_request InferenceRequest DynamicInferenceRequest Status
megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper GPTInferenceWrapper
megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper GPTInferenceWrapper
megatron.core.inference.sampling_params SamplingParams
megatron.core.inference.text_generation_controllers.text_generation_controller TextGenerationController
petals.client InferenceSession RemoteGenerationMixin
petals.client.inference_session InferenceSession
petals.client.remote_generation RemoteGenerationMixin RemotePastKeyValues
petals.models.bloom DistributedBloomForCausalLM
petals.models.falcon DistributedFalconForCausalLM
petals.models.llama DistributedLlamaForCausalLM
petals.models.mixtral DistributedMixtralForCausalLM
petals.utils.auto_config AutoDistributedModelForCausalLM
"""


@pytest.mark.parametrize("line", ORIGINALS.strip().splitlines())
def test_the_paths_of_the_originals_have_their_names(line):
    path, *names = line.split()
    module = importlib.import_module(f"verbatim.compat.{path}")
    adapter = importlib.import_module(f"verbatim.compat.{path.partition('.')[0]}")
    for name in names:
        value = getattr(module, name)
        assert value is getattr(adapter, name)
        assert not isinstance(value, type) or pickle.loads(pickle.dumps(value)) is value
    child, parent = (
        path.rpartition(".")[2],
        importlib.import_module(module.__name__.rpartition(".")[0]),
    )
    assert getattr(parent, child) is module


@pytest.mark.slow
def test_a_path_is_imported_first_and_another_one_is_not_found():
    """In a process that has imported nothing else."""
    program = (
        "from verbatim.compat.coati.models.generation import generate\n"
        "import verbatim.compat.kempnerforge.model.generate as module\n"
        "print(generate.__module__, module.sample.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "verbatim.compat.coati.generation",
        "verbatim.compat.kempnerforge.generation",
    ]
    for path in ("coati.models.loss", "coati.model", "petals.cli", "flexllmgen.flex"):
        with pytest.raises(ModuleNotFoundError, match=path):
            importlib.import_module(f"verbatim.compat.{path}")

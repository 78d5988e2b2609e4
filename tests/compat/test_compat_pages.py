"""Rules for every API of `verbatim.compat`: it only translates, and the engine generates."""

from __future__ import annotations

import ast
import importlib
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import verbatim.compat
from support.apis import APIS
from support.kempner_toys import as_llama, kempner_toy
from support.pairwise import parametrize_combinations
from support.programs import run_program
from support.toys import make_toy, random_ids
from verbatim import LLM, InvalidRequest
from verbatim.compat import coati, flexllmgen, petals

MODEL_CALLS = {"forward", "run_one_forward_step", "multinomial", "softmax", "argmax", "topk"}
MODEL_CALLS |= {"log_softmax"}
MODEL_NAMES = {"model", "module", "actor"}
STEPS = {"step", "run", "sample", "sample_rows", "draw_rows", "generate", "dummy_forward", "peek"}
LENGTHS = ("max", "num_tokens", "new_tokens", "length")


def names_in(*nodes):
    """Return every name and attribute in `nodes`, and every one that is called."""
    inside = [node for root in nodes for node in ast.walk(root)]
    named = {getattr(node, "attr", getattr(node, "id", "")) for node in inside}
    called = {
        getattr(node.func, "attr", getattr(node.func, "id", ""))
        for node in inside
        if isinstance(node, ast.Call)
    }
    return named, called


def sins(source):
    """Return what an API must not contain: calls of a model, sampling by hand, loops over tokens."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [f"{start}{alias.name}" for alias in node.names]
            if any(name.startswith("torch.nn.functional") for name in names):
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


FILES = sorted(Path(verbatim.compat.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_compat_apis_neither_loop_over_tokens_nor_call_models(path):
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
def test_violation_check_detects_token_loops_and_model_calls(source):
    assert sins(source)


NOUNS = "batch cli compat core errors options params protocols text".split()


def test_compat_apis_import_only_allowed_modules():
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    found = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    found -= {*verbatim._HOMES, "verbatim", "verbatim.engine.handle", "verbatim.common.checks"}
    # The actor runs the hidden states of Petals' sessions, through the handle.
    found -= {"verbatim.api.padded", "verbatim.placement.actor"}
    inner = {name[9:] for name in found if name.startswith("verbatim.")}
    assert not {name for name in inner if name.split(".")[0] not in NOUNS}


# Import paths of the five systems, and the names that programs import from them.
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
def test_original_import_paths_export_original_names(line):
    path, *names = line.split()
    module = importlib.import_module(f"verbatim.compat.{path}")
    adapter = importlib.import_module(f"verbatim.compat.{path.partition('.')[0]}")
    for name in names:
        value = getattr(module, name)
        assert value is getattr(adapter, name)
        assert not isinstance(value, type) or pickle.loads(pickle.dumps(value)) is value
    parent, _, child = module.__name__.rpartition(".")
    assert getattr(importlib.import_module(parent), child) is module


@pytest.mark.slow
def test_original_path_imports_in_fresh_process_and_unknown_path_raises():
    """The paths work in a process that has imported nothing else."""
    program = (
        "from verbatim.compat.coati.models.generation import generate\n"
        "import verbatim.compat.kempnerforge.model.generate as module\n"
        "print(generate.__module__, module.sample.__module__)"
    )
    homes = [f"verbatim.compat.{api}.generation" for api in ("coati", "kempnerforge")]
    assert run_program("-c", program).split() == homes
    for path in ("coati.models.loss", "coati.model", "petals.cli", "flexllmgen.flex"):
        with pytest.raises(ModuleNotFoundError, match=path):
            importlib.import_module(f"verbatim.compat.{path}")


# ---- common behaviour of all APIs, without `seed` and without an EOS

ROWS = torch.tensor([random_ids(6, seed) for seed in range(3)])
every_door = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


@every_door
def test_torch_seed_reproduces_run_and_equal_rows_differ(api):
    model, same = make_toy("llama"), ROWS[:1].repeat(4, 1)
    torch.manual_seed(41)
    first, second = (api(model, same, 12, True) for _ in range(2))
    torch.manual_seed(41)
    assert torch.equal(api(model, same, 12, True), first) and not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) == 4
    state = torch.get_rng_state()
    api(model, same, 2, False)
    drawn = not torch.equal(torch.get_rng_state(), state)
    # These draw one number per call, also when greedy.
    assert drawn == (api in (APIS["llm"], APIS["megatron"]))


@parametrize_combinations(door=[*APIS], sampled=[False, True])
def test_llm_and_live_modules_generate_same_tokens(door, sampled):
    api, toy = APIS[door], kempner_toy()
    with LLM(as_llama(toy), kv_memory="1MB") as llm:
        torch.manual_seed(3)
        expected = APIS["llm"](llm, ROWS, 8, sampled)
        for model in (llm, as_llama(toy), toy):
            torch.manual_seed(3)
            assert torch.equal(api(model, ROWS, 8, sampled), expected)


@every_door
def test_eos_of_model_config_is_ignored(api):
    llama = make_toy("llama", eos_token_id=list(range(128)))
    assert api(llama, ROWS, 6, False).shape == (3, 12)


@every_door
def test_results_are_plain_int64_tensors_for_any_input_dtype(api):
    model = make_toy("llama")
    expected = api(model, ROWS, 3, False)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        out = api(model, ROWS.to(dtype), 3, False)
        assert torch.equal(out, expected) and out.dtype is torch.int64
    if api not in (APIS["megatron"], APIS["flexllmgen"]):  # these return no tensor of all rows
        with torch.inference_mode():
            out = api(model, ROWS, 3, False)
        assert not out.is_inference() and not out.requires_grad
        torch.nn.Embedding(128, 4)(out).sum().backward()


@every_door
def test_ids_outside_vocabulary_are_rejected_before_any_forward(api):
    with LLM(make_toy("llama"), kv_memory="1MB") as llm:
        for wrong in (-1, 128):
            with pytest.raises(InvalidRequest, match=str(wrong)):
                api(llm, torch.tensor([[5, 6], [7, wrong]]), 2, False)
        if api is not APIS["petals"]:  # it rejects zero new tokens, as transformers does
            assert torch.equal(api(llm, ROWS, 0, False), ROWS)
        assert llm.stats()["forwards"] == 0


# ---- the APIs that take padded rows; 0 pads

TOKENIZER = SimpleNamespace(padding_side="left", eos_token_id=None, pad_token_id=0)


def through_petals(model, ids, mask, **more):
    more |= dict(attention_mask=mask, max_new_tokens=6, eos_token_id=None)
    return petals.DistributedModelForCausalLM(model).generate(ids, **more)


PADDED = {
    "coati": lambda model, ids, mask: coati.generate(
        model, ids, TOKENIZER, ids.shape[1] + 6, do_sample=False, attention_mask=mask
    ),
    "flexllmgen": lambda model, ids, mask: torch.from_numpy(
        flexllmgen.OptLM(model).generate(ids, 6, attention_mask=mask)
    ),
    "petals": through_petals,
    "petals with a processor": lambda *call: through_petals(*call, no_repeat_ngram_size=9),
}


@parametrize_combinations(door=[*PADDED], name=["llama", "gpt2"])
def test_leading_pads_are_masked_unless_attention_mask_includes_them(door, name):
    api, model = PADDED[door], make_toy(name, pad_token_id=0)
    ids = torch.tensor([[0, 0, 7, 9], [5, 0, 6, 8]])

    def alone(*row):
        return APIS["llm"](model, torch.tensor([row]), 6, False)[0, len(row) :].tolist()

    inner = alone(5, 0, 6, 8)
    assert len({str(new) for new in (alone(7, 9), alone(0, 7, 9), alone(0, 0, 7, 9))}) == 3
    masks = [None, [0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    for given, seen in zip(masks, [(7, 9), (7, 9), (0, 7, 9), (0, 0, 7, 9)], strict=True):
        for dtype in (torch.int64, torch.bool, torch.float32):
            mask = None if given is None else torch.tensor([given, [1] * 4], dtype=dtype)
            out = api(model, ids, mask)
            assert out.tolist() == [[*ids[0].tolist(), *alone(*seen)], [*ids[1].tolist(), *inner]]

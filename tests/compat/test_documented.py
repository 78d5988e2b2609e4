"""The pages of docs/coming-from: documented names exist, documented rejections happen, examples run."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationMixin

from support.kempner_toys import kempner_toy
from support.toy_tokenizers import byte_level
from support.toys import make_toy
from verbatim import LLM, EngineClosed
from verbatim.compat import coati, flexllmgen, kempnerforge, megatron, petals
from verbatim.compat.kempnerforge.command import parse
from verbatim.compat.megatron.controller import _REPLACED
from verbatim.compat.petals import settings
from verbatim.errors import InvalidRequest, NotSupported, VerbatimError

PAGES = Path(__file__).parents[2] / "docs/coming-from"
APIS = ("coati", "flexllmgen", "kempnerforge", "megatron", "petals")
IDS = torch.tensor([[5, 6, 7]])
LEFT, RIGHT = SimpleNamespace(padding_side="left"), SimpleNamespace(padding_side="right")
STEPS = (
    "_dynamic_step_context_init _dynamic_step_forward_logits _compute_serial_mtp_and_sample "
    "_dynamic_step_sample_logits_and_verify_tokens _dynamic_step_calculate_log_probs "
    "_dynamic_step_calculate_top_n_logprobs"
).split()


def opened():
    return petals.DistributedModelForCausalLM(make_toy("llama"))


def open_petals(**options):
    return petals.AutoDistributedModelForCausalLM.from_pretrained("no/model", **options)


def compressed(**changes):
    config = flexllmgen.CompressionConfig(4, 64, 1, **changes)
    return flexllmgen.Policy(1, 1, *[0] * 6, compress_weight=True, comp_weight_config=config)


# Each entry that the tables list as refused, and a call that is rejected.
REFUSED = {
    "generate(num_beams=2, do_sample=True)": lambda: coati.generate(
        None, IDS, LEFT, 9, num_beams=2, do_sample=True
    ),
    "generate_streaming(num_beams=2)": lambda: coati.generate_streaming(
        None, IDS, LEFT, 9, num_beams=2, do_sample=False
    ),
    "generate_streaming(process_group=)": lambda: coati.generate_streaming(
        None, IDS, LEFT, 9, process_group=object()
    ),
    "generate(tokenizer=)": lambda: coati.generate(None, IDS, RIGHT, 9),
    "Policy(attn_sparsity=0.5)": lambda: flexllmgen.Policy(1, 1, *[0] * 6, attn_sparsity=0.5),
    "CompressionConfig(symmetric=True)": lambda: compressed(symmetric=True),
    'OptLM(path="_DUMMY_")': lambda: flexllmgen.OptLM("opt-125m", path="_DUMMY_"),
    "--train.seed=1": lambda: parse(["x.toml", "--train.seed=1"]),
    **{
        f"TextGenerationController.{name}": lambda name=name: getattr(
            megatron.TextGenerationController, name
        )(None)
        for name in STEPS
    },
    "DynamicInferenceContext.add_request(prefill_chunk_length=)": lambda: (
        megatron.DynamicInferenceContext(None).add_request(
            megatron.InferenceRequest(request_id=1), prefill_chunk_length=4
        )
    ),
    "SamplingParams(streaming=True)": lambda: megatron.SamplingParams(streaming=True),
    "SamplingParams(do_kv_handoff=True)": lambda: megatron.SamplingParams(do_kv_handoff=True),
    "from_pretrained(dht_prefix=)": lambda: open_petals(dht_prefix="x"),
    "from_pretrained(tuning_mode=)": lambda: open_petals(tuning_mode="ptune"),
    "from_pretrained(active_adapter=)": lambda: open_petals(active_adapter="x"),
    "generate(penalty_alpha=)": lambda: opened().generate(IDS, max_length=5, penalty_alpha=0.6),
    "generate(custom_generate=)": lambda: opened().generate(IDS, max_length=5, custom_generate="x"),
    "generate(synced_gpus=True)": lambda: opened().generate(IDS, max_length=5, synced_gpus=True),
    "generate(past_key_values=)": lambda: opened().generate(
        IDS, max_length=5, past_key_values=petals.RemotePastKeyValues()
    ),
    "cuda()": lambda: opened().cuda(),
}


def page(api):
    return (PAGES / f"{api}.md").read_text()


def table(api):
    """Return the names in each row of the table, and their status."""
    text = page(api).split("## At a glance")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall("`([^`]+)`", names), status) for names, status in rows]


@pytest.mark.parametrize("api", APIS)
def test_names_documented_as_working_exist_with_their_arguments(api):
    adapter = importlib.import_module(f"verbatim.compat.{api}")
    for names, status in table(api):
        assert re.match(r"(works|refused|absent)\b", status), status
        for name in names if status.startswith("works") else ():
            dotted, _, argument = name.rstrip("=)").partition("(")
            if dotted.startswith("python -m") or "/" in dotted:
                continue
            value = adapter
            for part in dotted.split("."):
                value = getattr(value, part)
            assert not argument or argument in inspect.signature(value).parameters, name
        if status.startswith("absent"):
            assert not hasattr(adapter, names[0])


def test_every_documented_rejection_is_covered():
    rows = [row for api in APIS for row in table(api)]
    listed = [name for names, status in rows if status.startswith("refused") for name in names]
    assert sorted(n for n in listed if not n.startswith("padding_side")) == sorted(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_documented_rejections_name_what_they_reject(name):
    with pytest.raises(VerbatimError) as refusal:
        REFUSED[name]()
    assert isinstance(refusal.value, NotSupported | InvalidRequest) or name.startswith("--")
    words = re.findall("[a-z_]{3,}", name.partition("(")[2]) or re.findall("[a-z_]+", name)
    assert any(word in str(refusal.value) for word in words), str(refusal.value)


# The documented arguments of each function.
COATI = (
    "model input_ids tokenizer max_length num_beams=1 do_sample=True early_stopping={} top_k=None "
    "top_p=None temperature=None prepare_inputs_fn=None update_model_kwargs_fn=None model_kwargs"
)
SIGNATURES = {
    coati.generate: COATI.format(True),
    coati.generate_streaming: COATI.format(False),
    flexllmgen.OptLM: "config env=None path=None policy=None",
    flexllmgen.OptLM.generate: "self inputs max_new_tokens=32 do_sample=False temperature=1.0 stop=None "
    "debug_mode=None cut_gen_len=None verbose=0",
    kempnerforge.sample: "logits temperature=1.0 top_k=0 top_p=1.0",
    kempnerforge.generate: "model prompt_tokens max_new_tokens temperature=1.0 top_k=0 top_p=1.0 "
    "eos_token_id=None",
    petals.RemoteGenerationMixin.generate: " ".join(
        f"{p.name}={p.default!r}" if p.default is not p.empty else p.name
        for p in list(inspect.signature(GenerationMixin.generate).parameters.values())[:8]
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures_begin_with_documented_arguments(function):
    parameters = inspect.signature(function).parameters.values()
    spelled = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    documented = SIGNATURES[function].split()
    assert spelled[: len(documented)] == documented


# What a page mentions besides `__all__`: these names, and the arguments of these functions.
NAMED = {
    "coati": "max_new_tokens stop_token_ids stream_interval attention_mask seed pad_token_id use_cache "
    "apply_loss_mask",
    "flexllmgen": [getattr(flexllmgen, n) for n in ("Policy", "CompressionConfig", "OptConfig")],
    "kempnerforge": [kempnerforge.sample, kempnerforge.generate],
    "megatron": [megatron.SamplingParams, " ".join(_REPLACED)],
    "petals": " ".join([*settings.SUPPORTED, *settings.REFUSED]),
}


@pytest.mark.parametrize("api", APIS)
def test_page_mentions_every_public_name_and_argument(api):
    adapter = importlib.import_module(f"verbatim.compat.{api}")
    named = [NAMED[api]] if isinstance(NAMED[api], str) else list(NAMED[api])
    named += [f for f in SIGNATURES if f.__module__.startswith(f"{adapter.__name__}.")]
    if api == "petals":
        named.pop()
    names = [*adapter.__all__]
    for each in named:
        names += each.split() if isinstance(each, str) else inspect.signature(each).parameters
    for name in {*names} - {"self", "model_kwargs"}:
        assert hasattr(adapter, name) or name not in adapter.__all__
        assert re.search(rf"\b{name}\b", page(api)), name


def test_methods_listed_in_megatron_page_exist():
    tables = page("megatron").split("## Public methods")[1].split("## Fields")[0].splitlines()
    cells = [line.split(" | ")[0] for line in tables if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    assert len(names) > 35
    for name in names:
        assert callable(getattr(megatron.TextGenerationController, name)), name


def run_example(api, scope, changes):
    """Run the code under "After" in the page, with some strings replaced."""
    code = "".join(part.split("```")[0] for part in page(api).split("```python\n")[2:])
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    exec(code, scope)
    return scope


def test_coati_page_example_runs():
    """The documented example, with only the import and the length changed."""
    torch.manual_seed(3)
    with LLM(kv_memory="32MB") as llm:
        hf = copy.deepcopy(llm.tokenizer.hf)
        ids = hf(["Once upon a time", "The fox"], padding=True, padding_side="left")["input_ids"]
        given = dict(actor_model=llm, tokenizer=hf, input_ids=torch.tensor(ids))
        scope = run_example("coati", given, {"max_length=256": "max_length=2048"})
    new = scope["sequences"][:, len(ids[0]) :]
    assert scope["sequences"][:, : len(ids[0])].tolist() == ids and new.shape[1] < 2048
    assert (new == hf.eos_token_id).any(dim=1).all()
    assert scope["partial_output"].shape == (2, 2048)
    assert scope["decoded"].startswith("Once upon a time")


def test_kempnerforge_page_examples_run_and_agree():
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    given = dict(model=kempner_toy(), prompt_tokens=ids, eos_id=127, torch=torch)
    scope = run_example("kempnerforge", given, {})
    assert torch.equal(scope["tokens"][:, : scope["out"].shape[1]], scope["out"])


def test_megatron_page_example_runs():
    scope = run_example("megatron", {}, {"LLM()": "LLM(kv_memory='16MB')"})
    requests = scope["requests"]
    assert all(len(r.generated_log_probs) == r.generated_length for r in requests.values())
    assert requests[0].text.startswith("Once upon a time")
    scope["llm"].close()


def test_flexllmgen_page_example_runs(tmp_path):
    hf = copy.deepcopy(byte_level().hf)
    hf.add_special_tokens({"pad_token": "<pad>"})
    hf.save_pretrained(tmp_path / "opt-toy")
    ids = dict(pad_token_id=hf.pad_token_id, bos_token_id=2, eos_token_id=2)
    make_toy("opt", vocab_size=len(hf), **ids).save_pretrained(tmp_path / "opt-toy")
    hf.padding_side = "left"
    scope = dict(tokenizer=hf, prompts=["the quick brown", "fox", "one two three"])
    changes = {"~/flexllmgen_offload_dir": str(tmp_path / "disk"), "~/opt_weights": str(tmp_path)}
    scope = run_example("flexllmgen", scope, changes | {"facebook/opt-1.3b": "opt-toy"})
    assert scope["output_ids"].shape == (3, 160) and len(scope["outputs"]) == 3
    assert list((tmp_path / "disk").iterdir()) == []
    with pytest.raises(EngineClosed):
        scope["model"].generate([[3]], 1)

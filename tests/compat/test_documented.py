"""The tables "At a glance" of docs/coming-from: what works is there, and a refusal names what it refuses."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.toys import make_toy
from verbatim.compat import coati, flexllmgen, megatron, petals
from verbatim.compat.kempnerforge.config import parse
from verbatim.errors import InvalidRequest, NotSupported, VerbatimError

PAGES = Path(__file__).parents[2] / "docs/coming-from"
DOORS = ("coati", "flexllmgen", "kempnerforge", "megatron", "petals")
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


# What the tables say is refused, and a call that does it.
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


def table(door):
    """The names of each row, and what is said of them."""
    text = (PAGES / f"{door}.md").read_text().split("## At a glance")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall("`([^`]+)`", names), said) for names, said in rows]


@pytest.mark.parametrize("door", DOORS)
def test_what_works_is_there_with_its_arguments(door):
    adapter = importlib.import_module(f"verbatim.compat.{door}")
    for names, said in table(door):
        assert said.split(":")[0].split(";")[0].split()[0] in ("works", "refused", "absent"), said
        for name in names if said.startswith("works") else ():
            dotted, _, argument = name.rstrip("=)").partition("(")
            if dotted.startswith("python -m") or "/" in dotted:
                continue
            value = adapter
            for part in dotted.split("."):
                value = getattr(value, part)
            assert not argument or argument in inspect.signature(value).parameters, name
        if said.startswith("absent"):
            assert not hasattr(adapter, names[0])


def test_every_refusal_of_the_tables_has_its_call():
    listed = [
        name
        for door in DOORS
        for names, said in table(door)
        for name in names
        if said.startswith("refused") and not name.startswith("padding_side")
    ]
    assert sorted(listed) == sorted(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_name(name):
    with pytest.raises(VerbatimError) as refusal:
        REFUSED[name]()
    assert isinstance(refusal.value, NotSupported | InvalidRequest) or name.startswith("--")
    words = re.findall("[a-z_]{3,}", name.partition("(")[2]) or re.findall("[a-z_]+", name)
    assert any(word in str(refusal.value) for word in words), str(refusal.value)

"""Every pair of choices that go together, in some run.

What is said depends on the model alone: the source's weights as the quantization holds them. So every run of
a covering array is compared with the plainest run of that model. Pairs that don't go together are refused,
and the refusal names both.
"""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from support.pairwise import Case, covering, pairs_of
from verbatim import LLM, Cluster, Offload, SamplingParams, VerbatimError, storyteller
from verbatim.compat import petals

EXAMPLE = Path(__file__).parents[2] / "examples" / "five_doors.py"
NEW = 10
CHOICES: dict[str, tuple[str, ...]] = {
    "door": ("llm", "coati", "kempnerforge", "megatron", "flexllmgen", "petals"),
    "placement": ("resident", "offload", "cluster"),
    "draft": ("none", "ngram", "mtp", "early-exit"),
    "quantization": ("none", "int8", "int4"),
    "source": ("folder", "module", "dcp"),
    "schedule": ("together", "few", "chunks", "evicted"),
}
IN_FEW_BITS = ("int8", "int4")
NAMES = {
    "module": "live module",
    "mtp": "Mtp",
    "early-exit": "EarlyExit",
    "offload": "Offload",
    "cluster": "Cluster",
    "int8": "quantization=",
    "int4": "quantization=",
}
# Pairs that are refused, and what the message must name.
APART = {
    frozenset({(field, one), (other_field, other)}): (NAMES[one], name or NAMES[other])
    for field, some, other_field, others, name in [
        ("source", ("module",), "placement", ("offload", "cluster"), "placement"),
        ("source", ("module",), "quantization", IN_FEW_BITS, ""),
        ("source", ("module",), "draft", ("mtp",), "draft='mtp'"),
    ]
    for one in some
    for other in others
}
# More than pairs of which a run must be.
AMONG_THEM = ("kempnerforge", "cluster", "mtp", "none", "dcp", "together")
CASES = covering(CHOICES, APART, [AMONG_THEM])


def test_the_array_covers_every_pair_that_is_not_refused() -> None:
    covered = set().union(*(pairs_of(CHOICES, case) for case in CASES))
    for one, other in itertools.combinations(CHOICES, 2):
        for a, b in itertools.product(CHOICES[one], CHOICES[other]):
            pair = frozenset({(one, a), (other, b)})
            assert (pair in covered) != (pair in APART), pair
    assert AMONG_THEM in CASES and len(CASES) < 45


@pytest.fixture(scope="module")
def doors() -> dict[str, Callable[[LLM, Tensor, int, bool], Tensor]]:
    spec = importlib.util.spec_from_file_location("five_doors", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.DOORS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The storyteller as torch.distributed.checkpoint writes it, with the layer that only drafts."""
    folder = tmp_path_factory.mktemp("dcp")
    weights: dict[str, Tensor] = {}
    for file in storyteller.path().glob("*.safetensors"):
        weights |= load_file(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(weights, checkpoint_id=str(folder))
    return folder


def options_of(choice: dict[str, str], checkpoint: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"model": storyteller.path()}
    if choice.get("source") == "module":
        options["model"] = AutoModelForCausalLM.from_pretrained(
            storyteller.path(), dtype=torch.bfloat16
        )
    elif choice.get("source") == "dcp":
        options |= {"model": checkpoint, "config": str(storyteller.path())}
    if choice.get("placement") == "offload":
        options["placement"] = Offload(weights=(30, 70, 0))
    elif choice.get("placement") == "cluster":
        options["placement"] = Cluster(stages=2)
    for name in ("draft", "quantization"):
        if choice.get(name, "none") != "none":
            options[name] = choice[name]
    schedules: dict[str, dict[str, Any]] = {
        "together": {},
        "few": {"max_sequences": 2},
        "chunks": {"max_batch_tokens": 8},
        "evicted": {"block_size": 4, "kv_memory": 11 * 4 * 1280},
    }
    return options | schedules[choice.get("schedule", "together")]


def said(llm: LLM, door: Callable[[LLM, Tensor, int, bool], Tensor]) -> list[Any]:
    rows = torch.tensor(
        [[5, 9, 300, 41, 8, 77, 1200], [7, 5, 1100, 3, 3, 90, 14], [900, 30, 6, 2, 8, 1, 55]]
    )
    made = []
    for sampled in (False, True):
        torch.manual_seed(11)
        made.append(door(llm, rows, NEW, sampled).tolist())
    return made


@pytest.fixture(scope="module")
def plainest(
    doors: dict[str, Callable[..., Tensor]], checkpoint: Path
) -> Callable[[str], list[Any]]:
    """What a model says by the plainest way there is; the source makes no other model of it."""

    @cache
    def of(quantization: str) -> list[Any]:
        with LLM(**options_of({"quantization": quantization}, checkpoint)) as llm:
            return said(llm, doors["llm"])

    return of


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_same_words(
    case: Case,
    doors: dict[str, Callable[..., Tensor]],
    checkpoint: Path,
    plainest: Callable[[str], list[Any]],
) -> None:
    choice = dict(zip(CHOICES, case, strict=True))
    with LLM(**options_of(choice, checkpoint)) as llm:
        assert said(llm, doors[choice["door"]]) == plainest(choice["quantization"])
        stats = llm.stats()
        if choice["draft"] in ("ngram", "mtp"):
            assert stats["draft"]["errors"] == 0
        if choice["draft"] == "mtp":
            assert stats["draft"]["drafted"] > 0
        if choice["schedule"] == "evicted" and choice["placement"] == "resident":
            assert stats["preemptions"] > 0


@pytest.mark.parametrize(
    "pair", [tuple(sorted(pair)) for pair in APART], ids=lambda p: "-".join(v for _, v in p)
)
def test_what_does_not_go_together_is_refused_by_name(
    pair: tuple[tuple[str, str], ...], checkpoint: Path
) -> None:
    with pytest.raises(VerbatimError) as refused, LLM(**options_of(dict(pair), checkpoint)):
        pass
    for name in APART[frozenset(pair)]:
        assert name in str(refused.value)


@pytest.mark.slow
def test_a_rollout_on_offload_has_the_resident_models_words_and_log_probs() -> None:
    from verbatim.rl import rollout

    facts = []
    for placement in (None, Offload(weights=(30, 70, 0))):
        with LLM(placement=placement) as llm:
            params = SamplingParams(max_tokens=8)
            made = rollout(llm, [[5, 9, 41], [7, 300]], params, group_size=3, seed=3)
            facts.append([made.sequences.tolist(), made.logprobs.tolist()])
    assert facts[0] == facts[1]


def test_a_petals_session_goes_on_across_a_weight_update() -> None:
    """From there on it says what the new weights say behind all that was said before."""
    prompt = torch.tensor([[5, 9, 300, 41]])
    plain = dict(max_new_tokens=6, do_sample=False, top_k=0, top_p=1.0, eos_token_id=None)
    from_pretrained = petals.AutoDistributedModelForCausalLM.from_pretrained
    with LLM() as llm, LLM() as before:
        weights = llm.engine.runner.decoder.held.named_parameters()
        drawn = torch.Generator().manual_seed(1)
        new = {n: t + 0.02 * torch.randn(t.shape, generator=drawn).to(t.dtype) for n, t in weights}
        model = from_pretrained(llm)
        with model.inference_session(max_length=64):
            first = model.generate(prompt, **plain)
            llm.update_weights(new)
            second = model.generate(None, **plain)
        assert torch.equal(second, model.generate(first, **plain)[:, first.shape[1] :])
        assert torch.equal(first, from_pretrained(before).generate(prompt, **plain))
        unchanged = from_pretrained(before).generate(first, **plain)[:, first.shape[1] :]
        assert not torch.equal(second, unchanged)


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    with torch.random.fork_rng():
        yield

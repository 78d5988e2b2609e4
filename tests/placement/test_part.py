"""Parts of a model, run one after the other, are bit-identical to the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from support import sweep, toys, wrappers
from support.pairwise import parametrize_combinations, slow_but
from support.requests_mixed import generated
from support.stores import Sequences
from support.toys import Folders
from verbatim import LLM, Offload, SamplingParams
from verbatim.api.source import open_model
from verbatim.batch import Batch
from verbatim.errors import EngineClosed, ModelError, TierFailed, UnsupportedModel
from verbatim.kv.store import KVStore
from verbatim.model.decoder import Decoder
from verbatim.model.early_exit import EarlyExit
from verbatim.model.loader import LoadedModel, ModelSource
from verbatim.model.routing import Records, open_records
from verbatim.params import CHOICES
from verbatim.placement.distributed.part import Part
from verbatim.placement.distributed.split import Split
from verbatim.protocols import Forward
from verbatim.weights.lazy import InMemory
from verbatim.weights.load import open_weights

SOME = ("llama", "gpt2", "bloom", "qwen3_moe", "gemma2")
SEQUENCES = Sequences(23, 5, 31, block_size=8, spare=1)
# Length of each sequence after each forward.
STEPS = ((3, 2, 17), (20, 4, 28), (21, 5, 29), (23, 5, 31))

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def open_both(folder: Path, dtype: str = "float32") -> tuple[Any, LoadedModel]:
    """Return the whole module and a skeleton of it."""
    source = ModelSource(folder, dtype)
    whole = open_weights(open_model, source, None)
    return whole.module, open_model(source, in_memory=False)


def held(module: Any) -> LoadedModel:
    """Return a skeleton of a module that was never saved."""
    lazy_weights = {p: InMemory(p.data) for p in module.parameters()}
    return LoadedModel(module, None, None, "held", lazy_weights=lazy_weights)


def batches() -> Iterator[Batch]:
    """Yield batches of three sequences: chunks of prompts, then single tokens while some have ended."""
    before = (0, 0, 0)
    for step in STEPS:
        which = [s for s in range(3) if step[s] > before[s]]
        second = step == STEPS[1]
        yield SEQUENCES.batch(
            which,
            [(before[s], step[s]) for s in which],
            last_only=not second,
            records_keys=True,
            block_copies=[(SEQUENCES.tables[0][0], *SEQUENCES.spare)] if second else [],
        )
        before = step


class Computed(NamedTuple):
    """Everything that a forward returns or writes."""

    logits: Tensor
    hidden: Tensor | None
    chosen: list[Tensor]  # by the routers and indexers
    kv: list[Tensor]
    states: list[Tensor]


def records_for(decoder: Decoder, store: KVStore) -> Records:
    records = open_records(decoder.spec.choices, store.num_blocks, store.block_size)
    for choices in records.values():
        choices.ids.fill_(0)
    return records


class Whole:
    """The model in one piece."""

    def __init__(self, module: Any) -> None:
        self.decoder = Decoder(module)
        self.store = SEQUENCES.store(self.decoder)
        self.records = records_for(self.decoder, self.store)

    def run(self, batch: Batch) -> Computed:
        out = self.decoder.run(batch, self.store, self.records)
        return _computed(out, [self.store], [self.records])


def run(
    part: Part, batch: Batch, received: Tensor | None, store: KVStore, *records: Any
) -> Forward:
    """Run one forward of a part."""
    part.enter(batch, received)
    return part.decoder.run(batch, store, *records)


class Chain:
    """The same model in parts, each with its own KV cache and records."""

    def __init__(self, split: Split, cuts: list[int]) -> None:
        ends = [0, *cuts, split.num_layers]
        self.parts = [Part(split, a, b) for a, b in pairwise(ends)]
        decoders = [part.decoder for part in self.parts]
        self.stores = [SEQUENCES.store(decoder) for decoder in decoders]
        self.records = list(map(records_for, decoders, self.stores))
        self.leaving: list[Tensor] = []

    def run(self, batch: Batch) -> Computed:
        received, self.leaving = None, []
        for part, store, records in zip(self.parts, self.stores, self.records, strict=True):
            out = run(part, replace(batch), received, store, records)
            if not part.is_last:
                received = out.logits
                self.leaving.append(received)
        return _computed(out, self.stores, self.records)


def _computed(out: Forward, stores: list[KVStore], records: list[Records]) -> Computed:
    chosen = [
        torch.cat(parts, dim=2)
        for name in CHOICES
        if (parts := [r[name].ids.clone() for r in records if name in r])
    ]
    kv = [x.clone() for store in stores for x in store.tensors]
    states = [x.clone() for store in stores if store.states for x in store.states.tensors]
    return Computed(out.logits, out.hidden, chosen, kv, states)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are bit-identical, NaN included."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_everywhere(expected: Computed, found: Computed) -> None:
    assert same(expected.logits, found.logits) and same(expected.hidden, found.hidden)
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        assert len(ours) == len(theirs) and all(map(same, ours, theirs))


def assert_cut_anywhere_it_is_the_same(
    module: Any, skeleton: LoadedModel, *, hidden: bool = False
) -> None:
    split = Split(skeleton)
    assert split.cuts
    middle = split.cuts[len(split.cuts) // 2]
    chains = [Chain(split, cuts) for cuts in ([], [middle], split.cuts)]
    whole = Whole(module)
    for batch in batches():
        batch = replace(batch, wants_hidden=hidden)
        expected = whole.run(batch)
        for chain in chains:
            assert_same_everywhere(expected, chain.run(batch))


@parametrize_combinations(3, name=SOME, dtype=["float32", "bfloat16"])  # others below, in float32
def test_model_cut_anywhere_is_bit_identical(name: str, dtype: str, folders: Folders) -> None:
    assert_cut_anywhere_it_is_the_same(*open_both(folders(name), dtype), hidden=True)


REFUSED = {  # can't be split at all; with a part of the reason
    "hrm_text": "outside of the list of layers",
    "inkling2_loop_text": "called once",
    "xmod": "no attribute 'output'",  # the model itself reads adapters of its first layer
}
# These toys have no possible cut, as layers share keys and values, or the states of routers.
NO_CUTS = "gemma3n_text gemma4 gemma4_text gemma4_text:moe gemma4_unified gemma4_unified_text zaya".split()


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep.supported())
def test_every_architecture_is_offloaded_and_cut_or_rejected(case: str, tmp_path: Path) -> None:
    sweep.build(case).save_pretrained(tmp_path)
    offload = Offload(gpu="300MB", weights=(0, 0, 100), batch_size=3, micro_batches=1)
    try:
        module, skeleton = open_both(tmp_path)
    except ModelError as error:  # such as a saved model type that transformers opens differently
        with pytest.raises(type(error)):
            LLM(tmp_path, placement=offload)
        return
    prompts = [[1 + (i * j * 7 + j) % 90 for j in range(1, 4 + 4 * i)] for i in range(4)]
    params = [SamplingParams(max_tokens=4, seed=i, prompt_logprobs=0) for i in range(4)]
    expected = generated(LLM(tmp_path, max_length=32), prompts, params)
    assert generated(LLM(tmp_path, max_length=32, placement=offload), prompts, params) == expected
    if case in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[case]):
            Split(skeleton)
    elif case in NO_CUTS:
        assert not Split(skeleton).cuts
    else:
        assert_cut_anywhere_it_is_the_same(module, skeleton)


# Layers of the first reuse the keys that another chose, of the second also its keys and values.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "cuts"), [("glm5_next", [1, 2, 3]), ("mistral_large4", [2])])
def test_layers_that_reuse_choices_of_keys_stay_in_one_part(
    name: str, cuts: list[int], tmp_path: Path
) -> None:
    if name not in wrappers.SUPPORTED:
        pytest.skip(f"the installed transformers has no {name}")
    wrappers.make_wrapper(name).save_pretrained(tmp_path)
    module, skeleton = open_both(tmp_path)
    assert Split(skeleton).cuts == cuts
    assert_cut_anywhere_it_is_the_same(module, skeleton)


_SIX = dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3)
_SHARING: dict[str, dict[str, Any]] = {
    "gemma4_text": _SIX,
    "gemma3n_text": dict(_SIX, intermediate_size=96, activation_sparsity_pattern=[0.5, 0.0] * 3),
}


@pytest.mark.parametrize("name", slow_but(["gemma3n_text"], _SHARING))
def test_layers_sharing_kv_stay_in_one_part_with_per_layer_inputs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sweep.VARIANTS, f"{name}:six", _SHARING[name])
    module = sweep.build(f"{name}:six")
    split = Split(held(module))
    if not hasattr(module.config.get_text_config(decoder=True), "kv_sharing_modes"):
        # Older versions of transformers don't tell which layers share K and V: the model is not cut.
        assert split.cuts == []
        return
    assert split.cuts == [1, 2]
    assert split.shared  # the embedding of per-layer inputs
    assert_cut_anywhere_it_is_the_same(module, held(module))


def test_hidden_states_may_be_strided_or_unaligned(folders: Folders) -> None:
    """Received hidden states may start at an unaligned address, or be a slice of a wider buffer."""
    _, skeleton = open_both(folders("opt"))  # no norm before its layers
    split = Split(skeleton)
    plain, moved = Chain(split, [1]), Chain(split, [1])
    for batch in batches():
        expected = plain.run(batch)
        (rows,) = plain.leaving
        wide = torch.full((len(rows), 67), torch.nan)
        wide[:, 1:65] = rows
        first, last = moved.parts
        run(first, replace(batch), None, moved.stores[0])
        out = run(last, replace(batch), wide[:, 1:65], moved.stores[1])
        assert same(expected.logits, out.logits)
        odd = torch.cat([torch.zeros(1), rows.flatten()])[1:].view_as(rows)
        out = run(last, replace(batch), odd, moved.stores[1])
        assert same(expected.logits, out.logits)


def test_part_reads_only_its_own_weights(tmp_path: Path) -> None:
    toys.make_toy("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    module, skeleton = open_both(tmp_path)
    own_files, other_files = set(), []
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        if any(".layers.2." in name for name in names):
            other_files.append(path)
        else:
            own_files.add(path)
    assert own_files and other_files
    for path in other_files:
        path.write_bytes(b"nothing of use")
    split = Split(skeleton)
    part = Part(split, 1, 2)
    with pytest.raises(TierFailed, match="changed"):
        Part(split, 2, 3)
    layer = module.model.layers[1]
    assert part.weight_bytes == sum(p.nbytes for p in layer.parameters())
    assert part.num_parameters == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_part_holds_memory_of_only_its_own_weights(name: str, folders: Folders) -> None:
    _, skeleton = open_both(folders(name))
    split = Split(skeleton)
    before, after = split.sizes().outside
    for first, end in ((0, 1), (1, 2), (1, 3), (0, 3)):
        part = Part(split, first, end)
        held_bytes = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
            for p in part.decoder.module.parameters()
        }
        needed = sum(skeleton.lazy_weights[p].nbytes for p in split.parameters(first, end))
        placeholders = 4 * len(held_bytes)  # one number each
        assert needed <= sum(held_bytes.values()) <= needed + placeholders
        assert part.weight_bytes == needed
        tied = before + after if name == "llama" else None
        expected = sum(split.layer_bytes[first:end]) + before * (first == 0) + after * (end == 3)
        assert needed == expected or (tied is None and (first, end) == (0, 3))
        part.close()
        with pytest.raises(EngineClosed):
            part.decoder.module  # noqa: B018
    assert all(p.untyped_storage().nbytes() <= 4 for p in skeleton.module.parameters())
    for draft in (None, EarlyExit(1)):
        for layer, outside in zip((0, 2), split.sizes(draft).outside, strict=True):
            parameters = split.parameters(layer, layer + 1, draft)
            needed = sum(skeleton.lazy_weights[p].nbytes for p in parameters)
            assert outside == needed - split.layer_bytes[layer], (draft, layer)


# ---- models with more than a plain sequence of layers


def unusual(kind: str, num_layers: int = 5) -> Any:
    """Return a Llama with unusual computation between its layers."""
    from transformers import LlamaModel
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Layer(LlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden: Tensor, *, shared: Any, **kwargs: Any) -> Any:
            return super().forward(hidden, **kwargs)

    class Body(LlamaModel):  # type: ignore[misc]
        def forward(self, input_ids: Any, position_ids: Any = None, **_: Any) -> Any:
            embedded = self.embed_tokens(input_ids)
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1])[None]
            mask = create_causal_mask(self.config, embedded, None, None, position_ids=position_ids)
            cos_sin = self.rotary_emb(embedded, position_ids=position_ids)
            hidden, shared = embedded, {}
            kept = [hidden]
            layers = list(self.layers)
            for i, layer in enumerate(layers + layers[-1:] if kind == "twice" else layers):
                extra = {"shared": shared} if kind == "object" else {}
                hidden = layer(
                    hidden,
                    attention_mask=mask,
                    position_ids=position_ids,
                    position_embeddings=cos_sin,
                    **extra,
                )
                kept.append(hidden)
                if kind == "skip" and i == 2:
                    hidden = hidden + kept[1]
                if kind == "embedding":
                    hidden = hidden * 0.5 + embedded
                if kind == "norms":
                    hidden = self.norm(hidden)
            if kind == "mean":
                hidden = torch.stack(kept).mean(0)
            return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    toy = toys.make_toy("llama", num_hidden_layers=num_layers)
    body = Body(toy.config)
    body.load_state_dict(toy.model.state_dict())
    toy.model = body
    for layer in body.layers if kind == "object" else ():
        layer.__class__ = Layer
    return toy.eval()


def test_skip_connection_is_not_cut() -> None:
    module = unusual("skip")
    assert Split(held(module)).cuts == [4]
    assert_cut_anywhere_it_is_the_same(module, held(module))


@pytest.mark.parametrize("kind", ["embedding", "norms"])
def test_weights_used_between_layers_are_on_every_part(kind: str) -> None:
    module = unusual(kind)
    skeleton = held(module)
    split = Split(skeleton)
    assert split.cuts == [1, 2, 3, 4]
    needed = module.model.embed_tokens if kind == "embedding" else module.model.norm
    assert split.shared == {needed.weight}
    assert_cut_anywhere_it_is_the_same(module, skeleton)


@pytest.mark.parametrize("kind", ["mean", "object"])
def test_values_shared_by_several_layers_prevent_every_cut(kind: str) -> None:
    assert Split(held(unusual(kind))).cuts == []


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_exp_in_stateless_layer_is_bit_identical_in_a_part_of_its_own(name: str) -> None:
    module = toys.make_toy(name)
    layers = [m for m in module.model.layers if any("attn" in child for child in m._modules)]
    cls = type(layers[0])

    class Layer(cls):  # type: ignore[misc,valid-type]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = cls.forward(self, hidden_states, *args, **kwargs)
            return out + torch.exp(-out.abs())

    for layer in layers:
        layer.__class__ = Layer
    skeleton = held(module)
    split = Split(skeleton)
    assert len(split.cuts) == split.num_layers - 1
    whole, alone = Decoder(module).spec, [Part(split, i, i + 1) for i in range(3)]
    assert whole.states and not all(part.decoder.spec.states for part in alone)
    assert_cut_anywhere_it_is_the_same(module, skeleton)


def test_model_running_a_layer_twice_is_rejected() -> None:
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM can't be cut into parts.*once"):
        Split(held(unusual("twice")))


def test_part_with_nan_weights_is_rejected() -> None:
    """Weights that a part lacks are NaN, so that a part that uses them fails to open."""
    module = toys.make_toy("llama")
    module.model.layers[1].mlp.up_proj.weight.data[:] = torch.nan
    split = Split(held(module))
    Part(split, 0, 1)
    with pytest.raises(UnsupportedModel, match="layers 1 to 3 alone produce NaN"):
        Part(split, 1, 3)

"""The Coati API: its documented calls, and regression tests for defects of the original."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DynamicCache,
    RwkvConfig,
    RwkvForCausalLM,
    StaticCache,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import verbatim
from support.kempner_toys import Toy, kempner_toy
from support.pairwise import slow_but
from support.programs import started
from support.toys import build, make_toy, random_ids
from verbatim import (
    LLM,
    InvalidRequest,
    NotSupported,
    PromptTooLong,
    RequestFailed,
    SamplingParams,
    UnsupportedModel,
)
from verbatim.api.opening import open_runner
from verbatim.compat.coati import (
    _is_sequence_finished,
    _prepare_logits_processor,
    _sample,
    _sample_streaming,
    generate,
    generate_streaming,
    prepare_inputs_fn,
    update_model_kwargs_fn,
)
from verbatim.placement.actor import ActorDecoder
from verbatim.placement.callbacks import CallbackDecoder
from verbatim.placement.external import Piece, RowsRunner
from verbatim.placement.options import EngineOptions
from verbatim.placement.resident import Resident

PAD, EOS = 0, 2
ROWS = [random_ids(5, 1), random_ids(8, 2), random_ids(1, 3), random_ids(8, 4)]


def tokenizer(eos=EOS, pad=PAD, side="left"):
    return SimpleNamespace(padding_side=side, eos_token_id=eos, pad_token_id=pad)


TOK = tokenizer()
ENDLESS = tokenizer(eos=None)


def padded(rows, pad=PAD):
    width = max(map(len, rows))
    return torch.tensor([[pad] * (width - len(row)) + row for row in rows])


IDS = padded(ROWS)
P = IDS.shape[1]


@pytest.fixture(scope="module")
def model():
    return make_toy("llama")


@pytest.fixture(scope="module")
def gpt2():
    return make_toy("gpt2")


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, kv_memory="4MB") as llm:
        yield llm


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class DictActor(nn.Module):
    """An actor as in Coati: wraps a model and returns a dict."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, **kwargs):
        outputs = self.model(input_ids, attention_mask=attention_mask, **kwargs)
        return {"logits": outputs.logits}


class LeastLikely(DictActor):
    """Its outer forward negates the logits; it has no config, so its vocabulary size is unknown."""

    def forward(self, input_ids):
        return SimpleNamespace(logits=-self.model(input_ids).logits)


LONG = torch.arange(250)[None] % 100 + 5


def greedy(model, ids=IDS, tok=ENDLESS, length=P + 10, **kwargs):
    return generate(model, ids, tok, length, do_sample=False, **kwargs)


def by_hand(forward, row, count):
    """Return greedy tokens of one row, from full forwards without a cache."""
    ids = list(row)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(forward(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(row) :]


def own_logits(model):
    return lambda ids: model(input_ids=ids).logits


def new(out):
    return out[:, P:].tolist()


def end_of_stream(*args, **kwargs):
    *_, last = generate_streaming(*args, **kwargs)
    return last


# ---- documented calls


def test_sample_and_sample_streaming_accept_token_ids_instead_of_tokenizer(model):
    ids, given = padded([[5, 6, 7], [8]]), dict(top_k=20, temperature=0.7, seed=3, max_new_tokens=6)
    expected = generate(model, ids, tokenizer(), 30, stop_token_ids=[[9]], **given)
    ends = dict(eos_token_id=EOS, pad_token_id=PAD, stop_token_ids=[[9]])
    assert torch.equal(_sample(model, ids, 30, **ends, **given), expected)
    *_, last = _sample_streaming(model, ids, 30, **ends, **given)
    streamed = end_of_stream(model, ids, tokenizer(), 30, stop_token_ids=[[9]], **given)
    assert torch.equal(last, streamed) and last.shape == (2, 9)


def test_greedy_and_seeded_calls_leave_torch_rng_state_unchanged(model):
    before = torch.get_rng_state()
    greedy(model)
    generate(model, IDS, TOK, P + 3, seed=5)
    with pytest.raises(InvalidRequest):
        generate(model, IDS, TOK, P + 3, top_p=2.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_prepare_inputs_hook_sees_every_step_and_changes_no_token(model):
    widths, masks, pasts = [], [], []

    def record(input_ids, past=None, **model_kwargs):
        widths.append(tuple(input_ids.shape))
        masks.append(model_kwargs["attention_mask"])
        pasts.append(past)
        return {"input_ids": input_ids, "attention_mask": model_kwargs["attention_mask"]}

    out = greedy(model, prepare_inputs_fn=record)
    assert torch.equal(out, greedy(model))
    assert widths == [(4, P + step) for step in range(10)]
    assert [tuple(mask.shape) for mask in masks] == widths
    assert masks[-1][:, :P].equal((IDS != PAD).long()) and masks[-1][:, P:].all()
    assert pasts[0] is None and all(past is not None for past in pasts[1:])


@pytest.mark.parametrize("name", slow_but(["gpt2"], ["llama", "gpt2", "qwen3_moe"]))
def test_actor_returning_dict_generates_same_tokens_as_its_model(name):
    model = make_toy(name)
    actor = DictActor(model)
    assert torch.equal(greedy(actor), greedy(model))
    sampled = [generate(m, IDS, TOK, P + 12, seed=7, top_k=9) for m in (actor, model)]
    assert torch.equal(*sampled)


def test_peft_lora_model_generates_same_tokens_as_merged_model(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # PEFT reads a deprecated attribute of transformers'
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(copy.deepcopy(model), config).eval()
        merged = copy.deepcopy(wrapped).merge_and_unload()
    expected = greedy(merged)
    assert not torch.equal(expected, greedy(model))
    assert torch.equal(greedy(wrapped), expected)
    assert torch.equal(greedy(DictActor(wrapped)), expected)
    assert torch.equal(greedy(wrapped, **OUR_HOOKS), expected)


def end_at(model, step, row=1):
    """Return a tokenizer whose EOS is token number `step` of a greedy row, and no earlier token of it."""
    tokens = new(greedy(model))[row]
    assert tokens[step - 1] not in tokens[: step - 1]
    return tokenizer(eos=tokens[step - 1])


def test_without_early_stopping_rows_and_streams_are_padded_to_max_length(model):
    tok = end_at(model, 3)
    row = IDS[1:2]
    out = greedy(model, row, tok, P + 9, early_stopping=False)
    assert out.shape == (1, P + 9)
    assert out[0, P + 2] == tok.eos_token_id and (out[0, P + 3 :] == PAD).all()
    assert torch.equal(end_of_stream(model, row, tok, P + 9, do_sample=False), out)
    assert greedy(model, row, tok, P + 9).shape == (1, P + 3)


def test_logits_processors_are_ordered_and_disabled_ones_are_omitted():
    found = _prepare_logits_processor(50, 0.95, 0.7)
    assert [type(p) for p in found] == [TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper]
    assert (found[0].temperature, found[1].top_k, found[2].top_p) == (0.7, 50, 0.95)
    assert len(_prepare_logits_processor(None, None, None)) == 0
    assert len(_prepare_logits_processor(0, 1.0, 1.0)) == 0
    assert len(_prepare_logits_processor(temperature=2)) == 1
    with pytest.raises(ValueError, match="top_p"):
        _prepare_logits_processor(top_p=1.5)


# ---- stop sequences, EOS, padding


def stops_of(model):
    """Return two stop sequences: two ids that greedy row 0 generates, and one id of row 1."""
    rows = new(greedy(model))
    return [rows[0][3:5], rows[1][6:7]]


def cut(row, stops):
    """Return a row of new ids up to and including its first stop sequence."""
    for end in range(1, len(row) + 1):
        if any(len(s) <= end and row[end - len(s) : end] == s for s in stops):
            return row[:end]
    return row


def test_stop_sequences_end_rows_with_and_without_streaming(model):
    two, one = stops_of(model)
    free = new(greedy(model))
    for given, meant in [
        ([two, one], [two, one]),
        ([tuple(two)], [two]),
        (two, [two]),
        (one, [one]),
        (one[0], [one]),
        (torch.tensor([two]), [two]),
        (torch.tensor(one[0]), [one]),
        ([], []),
        (None, []),
    ]:
        rows = [cut(row, meant) for row in free]
        width = max(map(len, rows))
        expected = [row + [PAD] * (width - len(row)) for row in rows]
        assert new(greedy(model, stop_token_ids=given)) == expected, given
        options = dict(do_sample=False, early_stopping=True, stop_token_ids=given)
        assert new(end_of_stream(model, IDS, ENDLESS, P + 10, **options)) == expected, given
        assert new(greedy(DictActor(model), stop_token_ids=given)) == expected, given
    assert len(cut(free[0], [two])) < 10 and len(cut(free[1], [one])) < 10


def test_finished_rows_are_filled_with_resolved_pad_token_id(model):
    free = new(greedy(model))
    stop = {"stop_token_ids": [free[0][:2]], "early_stopping": False}
    for tok, kwargs, pad in [
        (tokenizer(eos=None, pad=0), {}, 0),
        (tokenizer(eos=None, pad=5), {"attention_mask": (IDS != PAD).long()}, 5),
        (tokenizer(eos=127, pad=None), {"attention_mask": (IDS != PAD).long()}, 127),
        (tokenizer(eos=None, pad=None), {"attention_mask": (IDS != PAD).long()}, 0),
        (tokenizer(eos=None, pad=0), {"attention_mask": IDS != PAD, "pad_token_id": 9}, 9),
    ]:
        for target in (model, DictActor(model)):
            row = new(greedy(target, tok=tok, **stop, **kwargs))[0]
            assert row[:2] == free[0][:2] and row[2:] == [pad] * 8


def test_no_id_is_masked_as_padding_when_tokenizer_has_no_pad_token(model):
    row = [PAD, PAD, 7, 9]
    tokens = greedy(model, torch.tensor([row]), tokenizer(None, None), 10)[0, 4:].tolist()
    assert tokens == by_hand(own_logits(model), row, 6)


def test_left_padding_keeps_gpt2_tokens_when_hook_omits_position_ids(gpt2):
    expected = [by_hand(own_logits(gpt2), row, 10) for row in ROWS]
    for target in (gpt2, DictActor(gpt2)):
        assert new(greedy(target, prepare_inputs_fn=plain_inputs)) == expected


# ---- lengths


def test_prompt_over_max_length_raises_prompt_too_long(model):
    for call in (generate, generate_streaming):
        with pytest.raises(PromptTooLong, match=rf"{P} tokens wide, but max_length={P - 1}"):
            call(model, IDS, TOK, P - 1)


@pytest.mark.parametrize("kwargs", [{}, {"max_new_tokens": 0}])
def test_call_without_room_for_new_tokens_returns_prompt_without_forward(llm, kwargs):
    length, before = P + 5 if kwargs else P, llm.stats()["forwards"]
    out = generate(llm, IDS, TOK, length, **kwargs)
    assert torch.equal(out, IDS) and out is not IDS
    streamed = list(generate_streaming(llm, IDS, TOK, length, **kwargs))
    assert len(streamed) == 1 and torch.equal(streamed[0], IDS)
    assert llm.stats()["forwards"] == before


def test_smaller_of_max_length_and_max_new_tokens_applies(model):
    assert greedy(model, length=P + 10, max_new_tokens=4).shape[1] == P + 4
    assert greedy(model, length=P + 3, max_new_tokens=50).shape[1] == P + 3


def test_max_length_above_model_limit_is_clamped_with_warning(model, llm):
    for target in (model, llm, DictActor(model)):
        for call in (generate, end_of_stream):
            with pytest.warns(UserWarning, match=r"the model's limit is 256 .*most 6 are"):
                out = call(target, LONG, ENDLESS, 2048, do_sample=False, stream_interval=6)
            assert torch.equal(out, greedy(target, LONG, length=256))
        with pytest.raises(PromptTooLong, match="256"):
            generate(target, torch.full((1, 257), 5), TOK, 2048)
    with pytest.raises(PromptTooLong, match="1048576"):
        generate(lambda input_ids: None, IDS, TOK, 2**21)


def test_stream_yields_documented_lengths(model):
    for count, interval, lengths in [
        (7, 2, [1, 3, 5, 7]),
        (6, 2, [1, 3, 5, 6]),
        (7, 3, [1, 4, 7]),
        (3, 50, [1, 3]),
        (4, 1, [1, 2, 3, 4]),
        (1, 2, [1]),
        (0, 1, [0]),
        (0, 3, [0]),
    ]:
        draw = dict(seed=1, top_k=5)
        stream = generate_streaming(model, IDS, TOK, P + count, stream_interval=interval, **draw)
        pieces = list(stream)
        whole = generate(model, IDS, TOK, P + count, early_stopping=False, **draw)
        assert [piece.shape[1] - P for piece in pieces] == lengths
        assert all(torch.equal(piece, whole[:, : piece.shape[1]]) for piece in pieces)


def test_stream_waits_for_rows_still_in_prefill(model):
    with LLM(model, kv_memory="4MB", max_batch_tokens=5) as llm:  # prompts in chunks, one by one
        stream = generate_streaming(llm, IDS, ENDLESS, P + 7, do_sample=False, stream_interval=1)
        pieces = list(stream)
    whole = greedy(model, length=P + 7)
    assert [piece.shape[1] - P for piece in pieces] == [1, 2, 3, 4, 5, 6, 7]
    assert all(torch.equal(piece, whole[:, : piece.shape[1]]) for piece in pieces)


# ---- results


def test_results_are_no_inference_tensors_inside_inference_mode(model):
    with torch.inference_mode():
        outs = [
            generate(model, IDS.clone(), TOK, P),
            generate(DictActor(model), IDS, TOK, P + 3, seed=1),
            generate(model, IDS, TOK, P + 3, seed=1, **OUR_HOOKS),
            *generate_streaming(model, IDS, TOK, P + 3, seed=1),
        ]
    assert not any(out.is_inference() for out in outs)


def test_result_equals_verbatim_generate(model):
    draw = dict(seed=9, temperature=0.8, top_k=20, top_p=0.9)
    ends = dict(max_new_tokens=12, stop_token_ids=[EOS], ignore_eos=True)
    expected = verbatim.generate(model, IDS, (IDS != PAD).long(), **draw, **ends)
    assert torch.equal(generate(model, IDS, TOK, P + 12, **draw), expected)


def test_empty_batch_returns_empty_result(model):
    none = IDS[:0]
    assert greedy(model, none).shape == greedy(DictActor(model), none).shape == (0, P)
    assert greedy(model, none, early_stopping=False).shape == (0, P + 10)


def test_beam_search_returns_best_beam_of_each_row(model):
    params = SamplingParams(
        num_beams=3, max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=[EOS]
    )
    with LLM(model, kv_memory="4MB") as llm:
        best = [result.outputs[0].token_ids for result in llm.generate(ROWS, params)]
    for target in (model, DictActor(model)):
        out = new(greedy(target, tok=TOK, length=P + 8, num_beams=3))
        assert [row[: len(b)] for row, b in zip(out, best, strict=True)] == best
    assert best != [by_hand(own_logits(model), row, 8) for row in ROWS]


def test_stream_closed_early_frees_its_blocks(llm):
    stream = generate_streaming(llm, IDS, ENDLESS, P + 40)
    next(stream)
    assert llm.stats()["blocks_used"] > 0
    stream.close()
    assert llm.stats()["blocks_used"] == 0 and llm.stats()["running"] == 0
    for _ in generate_streaming(llm, IDS, ENDLESS, P + 40):
        break
    gc.collect()
    assert llm.stats()["blocks_used"] == 0
    never = generate_streaming(llm, IDS, ENDLESS, P + 40)
    never.close()
    assert llm.stats()["waiting"] == 0


def test_engine_opened_for_one_call_is_closed_after_it(model, monkeypatch):
    closed = []
    record_close = lambda runner: closed.extend(runner.placement.values())
    monkeypatch.setattr(Resident, "close", record_close)
    actor = DictActor(model)
    greedy(actor, length=P + 1)
    stream = generate_streaming(actor, IDS, ENDLESS, P + 9, **OUR_HOOKS)
    next(stream)
    assert closed == ["actor"]
    stream.close()
    assert closed == ["actor", "callbacks"]
    with pytest.raises(InvalidRequest, match="outside 0 to 127"):
        greedy(actor, IDS + 125)
    assert closed == ["actor", "callbacks", "actor"]


def test_closed_stream_does_not_keep_its_actor_alive(model):
    actor = DictActor(copy.deepcopy(model)).train()
    gone = weakref.ref(actor)
    stream = generate_streaming(actor, IDS, ENDLESS, P + 40)
    next(stream)
    assert all(layer.training for layer in actor.modules())
    stream.close()
    del stream, actor
    gc.collect()
    assert gone() is None


def test_stream_raises_request_failed_when_its_engine_is_closed(model):
    llm = LLM(model, kv_memory="4MB")
    stream = generate_streaming(llm, IDS, ENDLESS, P + 40)
    next(stream)
    llm.close()
    with pytest.raises(RequestFailed, match=r"ended by close\(\)"):
        next(stream)


def test_nan_logits_raise_request_failed_in_generate_and_stream(model):
    for call in (generate, end_of_stream):
        with pytest.raises(RequestFailed, match="no token can be drawn"):
            call(LateNaN(model, P + 3), IDS, ENDLESS, P + 20, stream_interval=1)


class LateNaN(DictActor):
    def __init__(self, model, length):
        super().__init__(model)
        self.length = length

    def forward(self, input_ids, attention_mask=None):
        logits = self.model(input_ids, attention_mask=attention_mask).logits
        return {"logits": logits * (float("nan") if input_ids.shape[1] >= self.length else 1.0)}


# ---- actors


class SimpleActor:
    """A callable that is no module and has no config."""

    def __init__(self, model):
        self.held = model
        self.calls = []

    def __call__(self, input_ids):
        self.calls.append(tuple(input_ids.shape))
        assert not self.held.training and not torch.is_grad_enabled()
        return {"logits": self.held(input_ids=input_ids).logits}


def test_outer_forward_of_actor_is_called(model):
    actor = LeastLikely(model)
    out = new(greedy(actor))
    assert out == [by_hand(lambda ids: -model(ids).logits, row, 10) for row in ROWS]
    assert out != new(greedy(model))


def test_actor_gets_whole_unpadded_rows_one_at_a_time(model):
    actor = SimpleActor(copy.deepcopy(model).train())
    lengths = [len(row) for row in ROWS]
    for target in (actor, actor.__call__):  # also a bound method
        actor.calls.clear()
        assert torch.equal(greedy(target, length=P + 2), greedy(model, length=P + 2))
        probe, *calls = actor.calls  # the first is for its vocabulary size
        assert probe == (1, 1)
        assert sorted(calls) == sorted((1, n + step) for n in lengths for step in range(2))
        assert actor.held.training


def test_training_modes_are_restored_after_call_and_after_exception(model):
    actor = LateNaN(copy.deepcopy(model), 10**9).train()
    actor.model.model.layers[1].eval()
    modes = [layer.training for layer in actor.modules()]
    greedy(actor, length=P + 2)
    assert [layer.training for layer in actor.modules()] == modes

    def broken(*args, **kwargs):
        raise ZeroDivisionError("mine")

    actor.config = actor.model.config
    actor.model.forward = broken
    with pytest.raises(ZeroDivisionError, match="mine"):
        greedy(actor, length=P + 2)
    assert [layer.training for layer in actor.modules()] == modes
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_actor_rows_have_same_bits_alone_batched_and_preempted(dtype):
    actor = DictActor(make_toy("llama", dtype=dtype, head_dim=10, intermediate_size=100))
    params = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)

    def run(rows, first=0, blocks=64, tokens=64):
        options = EngineOptions(None, None, 4, tokens, 8, None, None, False, None)
        runner = RowsRunner(ActorDecoder(actor, {}), block_size=4, num_blocks=blocks)
        with LLM._over(open_runner(runner, options)) as llm:
            admit = llm.engine.admission.admit
            requests = [admit(row, params, first_sample=first + i) for i, row in enumerate(rows)]
            outputs = [result.outputs[0] for result in llm.engine.run(requests)]
            preemptions.append(llm.stats()["preemptions"])
        return [(output.token_ids, output.logprobs) for output in outputs]

    preemptions = []
    alone = [run([row], first)[0] for first, row in enumerate(ROWS)]
    assert run(ROWS) == alone
    assert run(ROWS, blocks=9, tokens=7) == alone
    assert preemptions[-1] > 0 and not any(preemptions[:-1])


def test_actor_keyword_arguments_reach_its_forward(model):
    class Scaled(DictActor):
        def forward(self, input_ids, scale, attention_mask=None):
            logits = self.model(input_ids, attention_mask=attention_mask).logits
            return {"logits": logits * scale}

    actor = Scaled(model)
    assert torch.equal(greedy(actor, scale=1.0), greedy(model))
    out = new(greedy(actor, scale=-1.0))
    assert out == [by_hand(lambda ids: -model(ids).logits, row, 10) for row in ROWS]
    with pytest.raises(InvalidRequest, match="scales: the forward of Scaled takes no such"):
        greedy(actor, scales=1.0)
    with pytest.raises(NotSupported, match=r"scale is a tensor of shape \[4, 1\]"):
        greedy(actor, scale=torch.ones(4, 1))


def test_model_with_unsupported_state_runs_row_by_row(monkeypatch):
    monkeypatch.setattr("verbatim.model.trial.has_supported_states", lambda module: False)
    config = RwkvConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, context_length=64, pad_token_id=0
    )
    model = build(RwkvForCausalLM, config)
    rows = [[id % 64 for id in row] for row in ROWS[:3]]
    with pytest.raises(UnsupportedModel, match="state"):
        LLM(model)
    out = greedy(model, padded(rows), length=P + 5)
    assert new(out) == [by_hand(own_logits(model), row, 5) for row in rows]


def test_non_generative_models_and_callables_are_rejected(model):
    sizes = dict(num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = BertConfig(vocab_size=64, hidden_size=16, **sizes)
    refused = [
        (build(BertForMaskedLM, config), "can't be run on flat batches"),
        (lambda tokens: None, "takes tokens and no input_ids"),
        ("model", "can't be called"),
        (None, "can't be called"),
        (lambda input_ids: None, "returned NoneType"),
        (lambda input_ids: {"logits": torch.zeros(1, 5)}, r"shape \[1, 5\]"),
        (lambda input_ids: {"logits": torch.zeros(2, 1, 5)}, r"shape \[2, 1, 5\]"),
        (lambda input_ids: {"logits": torch.zeros(1, 1, 5).long()}, "int64"),
        (lambda input_ids: {"logits": torch.zeros(1, 1, 0)}, r"shape \[1, 1, 0\]"),
        (lambda input_ids: {"logits": torch.zeros(1, 1, 5, device="meta")}, "on meta"),
        (lambda input_ids: {"logits": torch.zeros(1, 1, 5).to_sparse()}, "torch.sparse_coo"),
        (lambda input_ids: 1 / 0, "raised ZeroDivisionError"),
    ]
    for target, why in refused:
        with pytest.raises(UnsupportedModel, match=why):
            greedy(target, torch.tensor([[1, 2]]), length=5)
    mislabelled = DictActor(model)
    mislabelled.config = SimpleNamespace(vocab_size=500)
    with pytest.raises(UnsupportedModel, match=r"\[1, 8, 128\].*\[1, 1 or more, 500\]"):
        greedy(mislabelled, IDS[1:2])


# ---- modules with kv_caches


def test_module_with_kv_caches_reuses_its_engine():
    module = kempner_toy()
    expected = [by_hand(module, row, 10) for row in ROWS]
    assert new(greedy(module)) == expected
    module.calls.clear()
    assert new(greedy(module)) == expected
    # Each token runs once: its cache is used, and no new engine is opened, which would run a trial.
    assert sum(rows * width for rows, width in module.calls) <= sum(len(row) + 9 for row in ROWS)
    assert new(end_of_stream(module, IDS, ENDLESS, P + 10, do_sample=False)) == expected
    assert new(greedy(nn.DataParallel(module))) == expected
    with pytest.warns(UserWarning, match="limit is 64"):
        assert greedy(module, length=65).equal(greedy(module, length=64))
    message = "note is not supported: the engine prepares the inputs of Toy"
    with pytest.raises(InvalidRequest, match=message):
        greedy(module, note=1)


def test_unsupported_kv_caches_module_runs_as_actor_if_it_takes_input_ids():
    class Both(Toy):
        def forward(self, input_ids, kv_caches=None):
            return {"logits": super().forward(input_ids)}

    class Neither(Toy):
        def forward(self, tokens, kv_caches=None):
            return {"logits": super().forward(tokens)}

    out = new(greedy(kempner_toy(cls=Both), length=P + 4))
    assert out == [by_hand(kempner_toy(), row, 4) for row in ROWS]
    with pytest.raises(UnsupportedModel, match="Neither"):
        greedy(kempner_toy(cls=Neither))


# ---- wrapped and sharded models


@pytest.mark.usefixtures("group")
def test_data_parallel_wrappers_run_without_collectives(model, monkeypatch):
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    actor = nn.parallel.DistributedDataParallel(DictActor(copy.deepcopy(model)))

    def no_collective(*args, **kwargs):
        raise AssertionError("a collective")

    for name in ("all_reduce", "broadcast", "_broadcast_coalesced", "barrier"):
        monkeypatch.setattr(dist, name, no_collective)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "forward", no_collective)
    expected = greedy(model)
    assert torch.equal(greedy(wrapped), expected)
    assert torch.equal(greedy(actor), expected)
    assert torch.equal(greedy(wrapped, **OUR_HOOKS), expected)
    assert torch.equal(greedy(nn.DataParallel(model)), expected)


@pytest.mark.usefixtures("group")
def test_sharded_models_are_rejected(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    second = fully_shard(copy.deepcopy(model), mesh=mesh)
    tensors = copy.deepcopy(model)
    weight = distribute_tensor(tensors.lm_head.weight.detach(), mesh, [Replicate()])
    tensors.lm_head.weight = nn.Parameter(weight)
    first = copy.deepcopy(model)
    first.__class__ = type("FullyShardedDataParallel", (type(model),), {})
    type(first).__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    for sharded, name in [
        (second, "FSDPModule"),
        (DictActor(second), "FSDPModule"),
        (tensors, "DTensor"),
        (SimpleNamespace(held=tensors, __call__=None), "DTensor"),
        (first, "FullyShardedDataParallel"),
    ]:
        for kwargs in ({}, OUR_HOOKS):
            with pytest.raises(NotSupported, match=rf"sharded over ranks \({name}\)"):
                greedy(sharded, **kwargs)


def test_parameters_on_meta_device_are_rejected(model):
    actor = DictActor(nn.Linear(2, 2, device="meta"))
    with pytest.raises(NotSupported, match=r"model\.weight is on meta"):
        greedy(actor)


RANKS = """
import sys, torch, torch.distributed as dist
from verbatim.compat.coati import _is_sequence_finished
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
for mine, other, expected in [(0, 0, True), (0, 1, False), (1, 0, False), (1, 1, False)]:
    for dtype in (torch.int64, torch.bool):
        unfinished = torch.tensor([0, (mine, other)[rank]]).to(dtype)
        before = unfinished.clone()
        assert _is_sequence_finished(unfinished) is expected
        assert torch.equal(unfinished, before)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_is_sequence_finished_is_true_only_if_all_ranks_finished(tmp_path):
    assert _is_sequence_finished(torch.tensor([0, 0])) is True
    assert _is_sequence_finished(torch.tensor([0, 1])) is False
    with pytest.raises(InvalidRequest, match="must be a tensor"):
        _is_sequence_finished([0])
    root = Path(verbatim.__file__).parents[1]
    settings = dict(cwd=root, stderr=subprocess.PIPE, text=True)
    first, second = ([sys.executable, "-c", RANKS, rank, str(tmp_path / "store")] for rank in "01")
    with started(first, **settings) as one, started(second, **settings) as other:
        for rank in (one, other):
            _, errors = rank.communicate()
            assert rank.returncode == 0, errors


# ---- hooks

OUR_HOOKS = dict(prepare_inputs_fn=prepare_inputs_fn, update_model_kwargs_fn=update_model_kwargs_fn)


def plain_inputs(input_ids, past=None, **model_kwargs):
    return {"input_ids": input_ids, "attention_mask": model_kwargs["attention_mask"]}


@pytest.mark.parametrize(
    "name",
    slow_but(["llama", "bloom", "gemma3"], ["llama", "gpt2", "qwen3_moe", "bloom", "gemma3"]),
)
def test_built_in_hooks_use_kv_cache_and_change_no_token(name):
    model = make_toy(name)
    widths, out = widths_of(model, lambda: greedy(model, **OUR_HOOKS))
    assert widths == [P] + [1] * 9
    assert torch.equal(out, greedy(model))
    for name, hook in OUR_HOOKS.items():  # each hook alone
        assert torch.equal(out, greedy(model, **{name: hook}))
    tok = tokenizer(eos=new(out)[1][3])
    for kwargs in (dict(seed=3, top_k=7), dict(do_sample=False)):
        plain = generate(model, IDS, tok, P + 12, **kwargs)
        hooked = generate(model, IDS, tok, P + 12, **kwargs, **OUR_HOOKS)
        assert torch.equal(plain, hooked)


def methods_of(model):
    """Return the methods of transformers that trainers pass as hooks."""
    return dict(
        prepare_inputs_fn=model.prepare_inputs_for_generation,
        update_model_kwargs_fn=model._update_model_kwargs_for_generation,
    )


def widths_of(model, run):
    """Return the width of `input_ids` in each forward of `model`, and the result of `run`."""
    widths = []
    note = lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1])
    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        out = run()
    finally:
        handle.remove()
    return widths, out


@pytest.mark.parametrize("name", slow_but(["qwen3", "gpt2"], ["llama", "qwen3", "mistral", "gpt2"]))
def test_transformers_methods_work_as_hooks_and_use_kv_cache(name):
    model = make_toy(name)
    expected = greedy(model)
    theirs = methods_of(model)
    positions = (IDS.cummax(dim=1).values > 0).long().cumsum(dim=1) - 1
    for hooks in (
        theirs,
        theirs | dict(use_cache=True, apply_loss_mask=True),
        theirs | dict(position_ids=positions.clamp(min=0)),
        theirs | dict(update_model_kwargs_fn=update_model_kwargs_fn),
        theirs | dict(prepare_inputs_fn=prepare_inputs_fn),
    ):
        widths, out = widths_of(model, lambda hooks=hooks: greedy(model, **hooks))
        assert torch.equal(out, expected)
        assert widths == [P] + [1] * 9
    for hooks in (theirs | dict(use_cache=False), dict(list(theirs.items())[:1])):
        widths, out = widths_of(model, lambda hooks=hooks: greedy(model, **hooks))
        assert torch.equal(out, expected)
        assert widths == [P + step for step in range(10)]


def test_transformers_methods_as_hooks_work_with_strict_actor_signature(model):
    class Strict(DictActor):
        def forward(self, input_ids, attention_mask, position_ids=None, past_key_values=None):
            return self.model(input_ids, attention_mask, position_ids, past_key_values)

    actor = Strict(model)
    actor.config = model.config  # without it, a forward of one token probes the vocabulary size
    widths, out = widths_of(actor, lambda: greedy(actor, **methods_of(model)))
    assert torch.equal(out, greedy(model)) and widths == [P] + [1] * 9


def test_prefix_held_only_in_past_key_values_is_kept(model):
    prefix, ids = torch.tensor([ROWS[0]] * 2), IDS[[1, 3]]
    with torch.no_grad():
        cache = model(prefix, use_cache=True).past_key_values

    def prepare(input_ids, past=None, **model_kwargs):
        mask = torch.ones(2, prefix.shape[1] + input_ids.shape[1], dtype=torch.int64)
        return {"input_ids": input_ids, "attention_mask": mask, "past_key_values": cache}

    widths, out = widths_of(model, lambda: greedy(model, ids, prepare_inputs_fn=prepare))
    rows = [by_hand(own_logits(model), prefix[0].tolist() + row, 10) for row in ids.tolist()]
    assert new(out) == rows and widths == [P] + [1] * 9


def test_past_key_values_that_do_not_match_input_ids_raise_request_failed(model):
    old = DynamicCache()
    arguments = dict(length=P + 2, past_key_values=old, **methods_of(model))
    assert torch.equal(greedy(model, **arguments), greedy(model, length=P + 2))
    with pytest.raises(RequestFailed, match="a cache of 9 tokens and 8 input_ids for 8 tokens"):
        greedy(model, **arguments)  # starts with the cache that the first call filled

    def drop_two_cached_tokens(input_ids, past=None, **model_kwargs):
        late = input_ids.shape[1] > P + 1
        inputs = prepare_inputs_fn(input_ids, past=past if late else None, **model_kwargs)
        inputs["past_key_values"] = past if late else None
        if late:
            past.crop(-2)
        return inputs

    with pytest.raises(RequestFailed, match="a cache of 7 tokens and 1 input_ids for 10 tokens"):
        greedy(model, prepare_inputs_fn=drop_two_cached_tokens)
    static = StaticCache(model.config, max_cache_len=P + 10)
    with pytest.raises(RequestFailed, match="a mask that is made for all of them"):
        greedy(model, past_key_values=static, **methods_of(model))


@pytest.mark.parametrize("use_cache", slow_but([True], [True, False, None]))
def test_trainer_arguments_and_alternative_spellings_change_no_token(llm, model, use_cache):
    seen = []

    class Cached(DictActor):
        def forward(self, input_ids, use_cache=True):
            seen.append(use_cache)
            return self.model(input_ids, use_cache=use_cache)

    trainers = dict(use_cache=use_cache, apply_loss_mask=bool(use_cache))
    expected = greedy(model)
    for target in (llm, model, DictActor(model), SimpleActor(model), Cached(model)):
        assert torch.equal(greedy(target, cache_position=torch.arange(P), **trainers), expected)
    assert set(seen) == {False}
    assert new(greedy(kempner_toy(), **trainers)) == new(greedy(kempner_toy()))
    drawn = generate(llm, IDS, TOK, P + 5, seed=3)
    assert torch.equal(generate(llm, IDS, TOK, P + 5, seed=3, do_sample=1, top_k=-1), drawn)
    assert torch.equal(generate(llm, IDS, TOK, P + 5, do_sample=0), greedy(llm, IDS, TOK, P + 5))
    assert not len(_prepare_logits_processor(top_k=-1))


def test_hooks_see_finished_rows_continued_with_pads(model):
    tok = end_at(model, 3)
    seen = []

    def record(input_ids, past=None, **model_kwargs):
        seen.append(input_ids)
        return plain_inputs(input_ids, **model_kwargs)

    out = greedy(model, tok=tok, prepare_inputs_fn=record)
    assert (out[1, P + 3 :] == PAD).all()
    assert all(torch.equal(ids, out[:, : ids.shape[1]]) for ids in seen) and len(seen) == 10


def test_each_hook_works_alone_and_gets_caller_keyword_arguments(model):
    updates, prepared = [], []

    def update(outputs, model_kwargs):
        updates.append((outputs.logits.shape, sorted(model_kwargs)))
        return {**model_kwargs, "step": len(updates)}

    def prepare(input_ids, past=None, step=None, note=None, **model_kwargs):
        prepared.append((step, note))
        return plain_inputs(input_ids, **model_kwargs)

    expected = greedy(model, length=P + 4)
    for one, other in ((None, update), (prepare, None), (prepare, update)):
        hooks = dict(prepare_inputs_fn=one, update_model_kwargs_fn=other)
        assert torch.equal(greedy(model, length=P + 4, note="a note", **hooks), expected)
    shapes = [shape for shape, _ in updates]
    assert shapes == [(4, P + step, 128) for step in range(4)] * 2
    assert updates[0][1] == ["attention_mask", "note"]
    assert updates[1][1] == ["attention_mask", "note", "step"]
    assert prepared == [(None, "a note")] * 4 + [(step, "a note") for step in (None, 5, 6, 7)]


def test_attention_mask_is_as_wide_as_input_ids_whatever_update_hook_returns(model):
    widths = []

    def prepare(input_ids, past=None, **model_kwargs):
        widths.append((input_ids.shape[1], model_kwargs["attention_mask"].shape[1]))
        return plain_inputs(input_ids, **model_kwargs)

    def grow(outputs, kwargs):
        mask = kwargs["attention_mask"]
        return {"attention_mask": torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)}

    expected = greedy(model)
    for update in (grow, lambda outputs, kwargs: kwargs, lambda outputs, kwargs: {}):
        out = greedy(model, prepare_inputs_fn=prepare, update_model_kwargs_fn=update)
        assert torch.equal(out, expected)
    assert len(widths) == 30 and all(ids == mask for ids, mask in widths)


def test_preempted_rows_are_recomputed_under_hooks(gpt2):
    without_past = []

    def prepare(input_ids, past=None, **model_kwargs):
        without_past.append(past is None)
        return prepare_inputs_fn(input_ids, past=past, **model_kwargs)

    expected = [by_hand(own_logits(gpt2), row, 10) for row in ROWS]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    for blocks, tokens, seats in [(64, 64, 8), (9, 7, 8), (64, 64, 3), (64, 5, 2), (64, 3, 8)]:
        without_past.clear()
        options = EngineOptions(None, None, 4, tokens, seats, None, None, False, None)
        hooks = prepare, update_model_kwargs_fn
        mask = (IDS != PAD).long()
        decoder = CallbackDecoder(gpt2, *hooks, IDS, mask, {}, PAD)
        runner = RowsRunner(decoder, block_size=4, num_blocks=blocks)
        with LLM._over(open_runner(runner, options)) as llm:
            results = llm.engine.run(llm._admit_rows(ROWS, params))
            assert [result.outputs[0].token_ids for result in results] == expected
        assert without_past[0] and any(without_past[1:]) == ((blocks, tokens, seats) != (64, 64, 8))


def test_row_that_missed_a_step_under_hooks_gets_correct_logits(gpt2):
    hooks = prepare_inputs_fn, update_model_kwargs_fn
    ids = IDS[:2]
    decoder = CallbackDecoder(gpt2, *hooks, ids, (ids != PAD).long(), {}, PAD)

    def logits(**grown):
        """Run each row extended by these tokens, in its own slots, and check its last logits."""
        pieces = []
        for row, more in ((0, grown.get("first")), (1, grown.get("second"))):
            if more is not None:
                all_ids = torch.tensor(ROWS[row] + more)
                at = torch.arange(len(all_ids))
                pieces.append(Piece(all_ids, len(at) - 1, 16 * (row + 1) + at, at[-1:]))
        with torch.no_grad():
            found = torch.cat(decoder.run_rows(pieces))
            alone = [own_logits(gpt2)(piece.ids[None])[0, -1] for piece in pieces]
        torch.testing.assert_close(found, torch.stack(alone), atol=1e-4, rtol=1e-4)

    logits(first=[], second=[])
    logits(first=[7])
    logits(first=[7, 8], second=[9])
    logits(first=[7, 8, 5], second=[9, 5])


class Mine(Exception):
    pass


@pytest.mark.parametrize("which", ["prepare_inputs_fn", "update_model_kwargs_fn"])
def test_hook_exception_propagates_and_model_stays_usable(model, which):
    error = Mine("of the third step")
    calls = []

    def hook(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return OUR_HOOKS[which](*args, **kwargs)

    model.train()
    for call in (generate, end_of_stream):
        calls.clear()
        with pytest.raises(Mine) as caught:
            call(model, IDS, TOK, P + 10, **{**OUR_HOOKS, which: hook})
        assert caught.value is error
    assert all(layer.training for layer in model.modules())
    model.eval()
    assert greedy(model, **OUR_HOOKS).equal(greedy(model))


def test_hook_returning_none_raises_request_failed(model):
    for name in OUR_HOOKS:
        with pytest.raises(RequestFailed, match=f"{name} returned NoneType; it must return a dict"):
            greedy(model, **{**OUR_HOOKS, name: lambda *args, **kwargs: None})


def test_pad_id_outside_vocabulary_is_rejected_only_under_hooks(model):
    beyond = IDS.masked_fill(IDS == PAD, 500)
    tok = tokenizer(eos=None, pad=500)
    expected = new(greedy(model))
    assert new(greedy(model, beyond, tok)) == expected
    assert new(greedy(DictActor(model), beyond, tok)) == expected
    with pytest.raises(InvalidRequest, match="id 500 is outside 0 to 127, and hooks pass"):
        greedy(model, beyond, tok, **OUR_HOOKS)
    with pytest.raises(InvalidRequest, match="id 500 is outside"):
        greedy(model, IDS, tokenizer(eos=None), pad_token_id=500, **OUR_HOOKS)
    alone = greedy(model, IDS[1:2], tok, **OUR_HOOKS)  # a single row is never padded
    assert new(alone) == expected[1:2]


def test_unsupported_uses_of_hooks_are_rejected(llm, model):
    with pytest.raises(NotSupported, match="an open LLM prepares its own"):
        greedy(llm, **OUR_HOOKS)
    with pytest.raises(NotSupported, match="num_beams=2 with prepare_inputs_fn"):
        greedy(model, num_beams=2, **OUR_HOOKS)
    with pytest.raises(InvalidRequest, match="prepare_inputs_fn='f': must be a function"):
        greedy(model, prepare_inputs_fn="f")
    with pytest.raises(InvalidRequest, match="the hooks always receive past"):
        greedy(model, past=None, **OUR_HOOKS)


def test_hook_helpers_behave_as_documented():
    ids, mask = torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])
    assert prepare_inputs_fn(ids)["input_ids"].equal(ids)
    assert set(prepare_inputs_fn(ids)) == {"input_ids"}
    inputs = prepare_inputs_fn(ids, attention_mask=mask, use_cache=True)
    assert inputs["attention_mask"] is mask and inputs["use_cache"] is True
    assert inputs["position_ids"].tolist() == [[0, 0, 1]]
    pair = torch.zeros(1, 2, 2, 4)  # keys or values of two tokens
    given = {"attention_mask": mask, "token_type_ids": torch.tensor([[1, 2, 3]])}
    inputs = prepare_inputs_fn(ids, past=((pair, pair),), **given)
    assert inputs["input_ids"].tolist() == [[6]] and inputs["past_key_values"][0][0] is pair
    assert inputs["position_ids"].tolist() == [[1]] and inputs["token_type_ids"].tolist() == [[3]]

    kwargs = {"attention_mask": mask, "token_type_ids": torch.tensor([[7, 8, 9]]), "other": 1}
    updated = update_model_kwargs_fn({"past_key_values": "cache"}, torch.tensor([[0]]), **kwargs)
    assert updated["past_key_values"] == "cache" and updated["other"] == 1
    assert updated["attention_mask"].tolist() == [[0, 1, 1, 0]]
    assert updated["token_type_ids"].tolist() == [[7, 8, 9, 9]]
    hooked = update_model_kwargs_fn(SimpleNamespace(logits=1), kwargs)
    assert hooked["past_key_values"] is None
    assert hooked["attention_mask"].tolist() == [[0, 1, 1, 1]]
    assert mask.tolist() == [[0, 1, 1]] and len(kwargs) == 3  # the caller's arguments are unchanged


# ---- rejected arguments


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(tokenizer=tokenizer(side="right")), "padding_side is 'right'"),
        (dict(tokenizer=None), "padding_side is None"),
        (dict(tokenizer=tokenizer(eos=[1, 2])), r"eos_token_id=\[1, 2\]"),
        (dict(tokenizer=tokenizer(pad=-1)), "pad_token_id=-1: must be an integer, 0 to"),
        (dict(input_ids=IDS.tolist()), r"input_ids must be an integer tensor .*, not list"),
        (dict(input_ids=IDS[0]), r"input_ids must be an integer tensor .*not torch.int64 \[8\]"),
        (dict(input_ids=IDS.float()), r"not torch.float32 \[4, 8\] on cpu"),
        (dict(input_ids=IDS[:, :0]), "row 0 of input_ids has no tokens"),
        (dict(input_ids=torch.zeros(2, 3).long()), "row 0 of input_ids has no tokens"),
        (dict(input_ids=IDS + 125), "outside 0 to 127"),
        (dict(max_length=None), "max_length=None: must be an integer"),
        (dict(max_length=True), "max_length=True"),
        (dict(max_new_tokens=-1), "max_new_tokens=-1: must be an integer, 0 or more"),
        (dict(num_beams=0), "num_beams=0: must be an integer, 1 or more"),
        (dict(num_beams=2), "num_beams=2 with do_sample=True"),
        (dict(num_beams=1000, do_sample=False), "num_beams=1000: must be an integer, 1 to 64"),
        (dict(num_beams=2, do_sample=False, top_k=5), "top_k=5 with num_beams=2"),
        (dict(do_sample=2), "do_sample=2: must be True or False"),
        (dict(early_stopping=None), "early_stopping=None: must be True or False"),
        (dict(temperature=0.0), "do_sample=False"),
        (dict(temperature=-1.0, do_sample=False), "temperature=-1.0"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_k=-2), "top_k=-2"),
        (dict(seed=-1), "seed=-1"),
        (dict(stream_interval=0), "stream_interval=0: must be an integer, 1 or more"),
        (dict(stop_token_ids=[[20], 21]), "but not both"),
        (dict(stop_token_ids=[[]]), "neither an id nor a list"),
        (dict(stop_token_ids="ab"), "'ab'"),
        (dict(stop_token_ids=[-1]), "-1 is not a token id"),
        (dict(stop_token_ids=500), "token id 500 is not in the vocabulary"),
        (dict(attention_mask=torch.ones(4, 3)), "attention_mask has shape"),
        (dict(attention_mask=torch.full((4, P), 2)), "must hold only 0"),
        (dict(attention_mask=torch.ones(4, P).flip(1).tril(6)), "padding at the end of row 0"),
        (dict(attention_mask=torch.tensor([1, 0] * 4 + [1] * 24).view(4, P)), "in the middle"),
        (dict(pad_token_id=10**30), f"pad_token_id={10**30}: must be an integer, 0 to {2**63 - 1}"),
        (dict(tokenizer=tokenizer(pad=2**63)), f"tokenizer.pad_token_id={2**63}: must be"),
        (dict(tokenizer=tokenizer(eos=2**63)), f"tokenizer.eos_token_id={2**63}: must be"),
        (dict(use_cache="no"), "use_cache='no': must be True, False or None"),
        (dict(apply_loss_mask=1), "apply_loss_mask=1: must be True, False or None"),
        (dict(token_type_ids=IDS), "token_type_ids is not supported"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected_before_any_forward(llm, change, why):
    before = llm.stats()["forwards"]
    arguments = {"input_ids": IDS, "tokenizer": TOK, "max_length": P + 5, **change}
    for call in (generate, generate_streaming):
        with pytest.raises((InvalidRequest, NotSupported), match=why):
            call(llm, **arguments)
    assert llm.stats()["forwards"] == before


@pytest.mark.parametrize(
    "change", [dict(seed=-1), dict(seed="a"), dict(stop_token_ids=[["x"]])], ids=str
)
def test_invalid_arguments_are_rejected_before_custom_forward_runs(change):
    class Custom(nn.Module):
        def forward(self, *args, **kwargs):
            raise AssertionError("the forward ran")

    with pytest.raises(InvalidRequest):
        generate(Custom(), IDS, TOK, max_length=P + 5, **change)


def test_eos_id_outside_vocabulary_is_ignored(model):
    out = greedy(model, tok=tokenizer(eos=500, pad=PAD))
    assert torch.equal(out, greedy(model))

"""The Coati door: its documented calls, and what the original gets wrong done right."""

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
from verbatim.opening import open_runner
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
    """Coati's kind: holds a model, returns a dict."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, **kwargs):
        outputs = self.model(input_ids, attention_mask=attention_mask, **kwargs)
        return {"logits": outputs.logits}


class LeastLikely(DictActor):
    """Its outer forward does something of its own, and it says nothing of its vocabulary."""

    def forward(self, input_ids):
        return SimpleNamespace(logits=-self.model(input_ids).logits)


LONG = torch.arange(250)[None] % 100 + 5


def greedy(model, ids=IDS, tok=ENDLESS, length=P + 10, **kwargs):
    return generate(model, ids, tok, length, do_sample=False, **kwargs)


def by_hand(forward, row, count):
    """Greedy tokens of one row, by a loop over whole forwards."""
    ids = list(row)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(forward(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(row) :]


def own_logits(model):
    return lambda ids: model(input_ids=ids).logits


def new(out):
    return out[:, P:].tolist()


# ---- five tests of a sceptical user


def test_the_functions_below_take_ids_in_place_of_a_tokenizer(model):
    ids, given = padded([[5, 6, 7], [8]]), dict(top_k=20, temperature=0.7, seed=3, max_new_tokens=6)
    expected = generate(model, ids, tokenizer(), 30, stop_token_ids=[[9]], **given)
    ends = dict(eos_token_id=EOS, pad_token_id=PAD, stop_token_ids=[[9]])
    assert torch.equal(_sample(model, ids, 30, **ends, **given), expected)
    *_, last = _sample_streaming(model, ids, 30, **ends, **given)
    *_, streamed = generate_streaming(model, ids, tokenizer(), 30, stop_token_ids=[[9]], **given)
    assert torch.equal(last, streamed) and last.shape == (2, 9)


def test_greedy_leaves_torchs_generator_alone_and_a_seed_as_well(model):
    before = torch.get_rng_state()
    greedy(model)
    generate(model, IDS, TOK, P + 3, seed=5)
    with pytest.raises(InvalidRequest):
        generate(model, IDS, TOK, P + 3, top_p=2.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_recording_hook_sees_every_step_and_changes_nothing(model):
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


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_an_actor_that_returns_a_dict_gives_the_bare_models_tokens(name):
    model = make_toy(name)
    actor = DictActor(model)
    assert torch.equal(greedy(actor), greedy(model))
    sampled = [generate(m, IDS, TOK, P + 12, seed=7, top_k=9) for m in (actor, model)]
    assert torch.equal(*sampled)


def test_a_lora_wrapped_model_gives_the_merged_ones_tokens(model):
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
    """A tokenizer whose end of sequence is what greedy row `row` says first as its token number `step`."""
    tokens = new(greedy(model))[row]
    assert tokens[step - 1] not in tokens[: step - 1]
    return tokenizer(eos=tokens[step - 1])


def test_without_early_stopping_rows_are_padded_to_the_full_length_and_streamed_as_far(model):
    tok = end_at(model, 3)
    row = IDS[1:2]
    out = greedy(model, row, tok, P + 9, early_stopping=False)
    assert out.shape == (1, P + 9)
    assert out[0, P + 2] == tok.eos_token_id and (out[0, P + 3 :] == PAD).all()
    *_, last = generate_streaming(model, row, tok, P + 9, do_sample=False)
    assert torch.equal(last, out)
    assert greedy(model, row, tok, P + 9).shape == (1, P + 3)


def test_logits_processors_come_in_order_and_those_that_are_off_not_at_all():
    found = _prepare_logits_processor(50, 0.95, 0.7)
    assert [type(p) for p in found] == [TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper]
    assert (found[0].temperature, found[1].top_k, found[2].top_p) == (0.7, 50, 0.95)
    assert len(_prepare_logits_processor(None, None, None)) == 0
    assert len(_prepare_logits_processor(0, 1.0, 1.0)) == 0
    assert len(_prepare_logits_processor(temperature=2)) == 1
    with pytest.raises(ValueError, match="top_p"):
        _prepare_logits_processor(top_p=1.5)


# ---- stops, ends, pads


def stops_of(model):
    """Two sequences of ids that rows 0 and 1 come by, the first of two ids, the second of one."""
    rows = new(greedy(model))
    return [rows[0][3:5], rows[1][6:7]]


def cut(row, stops):
    for end in range(1, len(row) + 1):
        if any(len(s) <= end and row[end - len(s) : end] == s for s in stops):
            return row[:end]
    return row


def test_stop_sequences_end_rows_streamed_and_not(model):
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
        *_, last = generate_streaming(
            model,
            IDS,
            ENDLESS,
            P + 10,
            do_sample=False,
            early_stopping=True,
            stop_token_ids=given,
        )
        assert new(last) == expected, given
        assert new(greedy(DictActor(model), stop_token_ids=given)) == expected, given
    assert len(cut(free[0], [two])) < 10 and len(cut(free[1], [one])) < 10


def test_what_fills_a_row_after_its_end(model):
    free = new(greedy(model))
    stop = {"stop_token_ids": [free[0][:2]], "early_stopping": False}
    for tok, kwargs, pad in [
        (tokenizer(eos=None, pad=0), {}, 0),
        (tokenizer(eos=None, pad=5), {"attention_mask": (IDS != PAD).long()}, 5),
        (tokenizer(eos=127, pad=None), {"attention_mask": (IDS != PAD).long()}, 127),
        (tokenizer(eos=None, pad=None), {"attention_mask": (IDS != PAD).long()}, 0),
        (tokenizer(eos=None, pad=0), {"attention_mask": IDS != PAD, "pad_token_id": 9}, 9),
    ]:
        for runs in (model, DictActor(model)):
            row = new(greedy(runs, tok=tok, **stop, **kwargs))[0]
            assert row[:2] == free[0][:2] and row[2:] == [pad] * 8


def test_without_a_pad_of_the_tokenizer_every_id_is_a_token(model):
    row = [PAD, PAD, 7, 9]
    tokens = greedy(model, torch.tensor([row]), tokenizer(None, None), 10)[0, 4:].tolist()
    assert tokens == by_hand(own_logits(model), row, 6)


def test_left_padding_leaves_gpt2_its_tokens_under_a_hook_without_positions(gpt2):
    expected = [by_hand(own_logits(gpt2), row, 10) for row in ROWS]
    for runs in (gpt2, DictActor(gpt2)):
        assert new(greedy(runs, prepare_inputs_fn=plain_inputs)) == expected


# ---- lengths


def test_a_prompt_over_max_length_is_refused_with_both_numbers(model):
    for call in (generate, generate_streaming):
        with pytest.raises(PromptTooLong, match=rf"{P} tokens wide, and max_length={P - 1}"):
            call(model, IDS, TOK, P - 1)


@pytest.mark.parametrize("kwargs", [{}, {"max_new_tokens": 0}])
def test_a_prompt_that_fills_the_length_comes_back_and_nothing_runs(llm, kwargs):
    length, before = P + 5 if kwargs else P, llm.stats()["forwards"]
    out = generate(llm, IDS, TOK, length, **kwargs)
    assert torch.equal(out, IDS) and out is not IDS
    streamed = list(generate_streaming(llm, IDS, TOK, length, **kwargs))
    assert len(streamed) == 1 and torch.equal(streamed[0], IDS)
    assert llm.stats()["forwards"] == before


def test_the_smaller_of_both_lengths_holds(model):
    assert greedy(model, length=P + 10, max_new_tokens=4).shape[1] == P + 4
    assert greedy(model, length=P + 3, max_new_tokens=50).shape[1] == P + 3


def test_a_length_above_the_models_limit_is_clamped_with_a_warning(model, llm):
    for runs in (model, llm, DictActor(model)):
        for pick in (
            generate,
            lambda *args, **kwargs: list(generate_streaming(*args, **kwargs))[-1],
        ):
            with pytest.warns(UserWarning, match=r"the model's limit is 256 .*most 6 are"):
                out = pick(runs, LONG, ENDLESS, 2048, do_sample=False, stream_interval=6)
            assert torch.equal(out, greedy(runs, LONG, length=256))
        with pytest.raises(PromptTooLong, match="256"):
            generate(runs, torch.full((1, 257), 5), TOK, 2048)
    with pytest.raises(PromptTooLong, match="1048576"):
        generate(lambda input_ids: None, IDS, TOK, 2**21)


def test_a_stream_has_the_documented_lengths(model):
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
        stream = generate_streaming(
            model, IDS, TOK, P + count, seed=1, top_k=5, stream_interval=interval
        )
        pieces = list(stream)
        whole = generate(model, IDS, TOK, P + count, seed=1, top_k=5, early_stopping=False)
        assert [piece.shape[1] - P for piece in pieces] == lengths
        assert all(torch.equal(piece, whole[:, : piece.shape[1]]) for piece in pieces)


def test_a_stream_waits_for_rows_that_are_still_in_their_prompt(model):
    with LLM(model, kv_memory="4MB", max_batch_tokens=5) as llm:  # prompts in chunks, one by one
        pieces = list(
            generate_streaming(llm, IDS, ENDLESS, P + 7, do_sample=False, stream_interval=1)
        )
    whole = greedy(model, length=P + 7)
    assert [piece.shape[1] - P for piece in pieces] == [1, 2, 3, 4, 5, 6, 7]
    assert all(torch.equal(piece, whole[:, : piece.shape[1]]) for piece in pieces)


# ---- results


def test_results_are_ordinary_tensors_also_inside_of_inference_mode(model):
    with torch.inference_mode():
        outs = [
            generate(model, IDS.clone(), TOK, P),
            generate(DictActor(model), IDS, TOK, P + 3, seed=1),
            generate(model, IDS, TOK, P + 3, seed=1, **OUR_HOOKS),
            *generate_streaming(model, IDS, TOK, P + 3, seed=1),
        ]
    assert not any(out.is_inference() for out in outs)


def test_rows_get_what_verbatim_generate_gives_them(model):
    out = generate(model, IDS, TOK, P + 12, seed=9, temperature=0.8, top_k=20, top_p=0.9)
    expected = verbatim.generate(
        model,
        IDS,
        (IDS != PAD).long(),
        max_new_tokens=12,
        seed=9,
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        stop_token_ids=[EOS],
        ignore_eos=True,
    )
    assert torch.equal(out, expected)


def test_no_rows_are_no_work(model):
    none = IDS[:0]
    assert greedy(model, none).shape == greedy(DictActor(model), none).shape == (0, P)
    assert greedy(model, none, early_stopping=False).shape == (0, P + 10)


def test_beams_give_the_best_of_each_row(model):
    params = SamplingParams(
        num_beams=3, max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=[EOS]
    )
    with LLM(model, kv_memory="4MB") as llm:
        best = [result.outputs[0].token_ids for result in llm.generate(ROWS, params)]
    for runs in (model, DictActor(model)):
        out = new(greedy(runs, tok=TOK, length=P + 8, num_beams=3))
        assert [row[: len(b)] for row, b in zip(out, best, strict=True)] == best
    assert best != [by_hand(own_logits(model), row, 8) for row in ROWS]


def test_a_stream_that_is_closed_early_frees_its_blocks(llm):
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


def test_an_engine_of_one_call_is_closed_with_it(model, monkeypatch):
    closed = []
    note = lambda runner: closed.extend(runner.placement.values())
    monkeypatch.setattr(Resident, "close", note)
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


def test_a_stream_of_an_actor_lets_go_of_it_when_closed(model):
    actor = DictActor(copy.deepcopy(model)).train()
    gone = weakref.ref(actor)
    stream = generate_streaming(actor, IDS, ENDLESS, P + 40)
    next(stream)
    assert all(layer.training for layer in actor.modules())
    stream.close()
    del stream, actor
    gc.collect()
    assert gone() is None


def test_an_engine_closed_by_somebody_else_is_an_error_and_no_short_answer(model):
    llm = LLM(model, kv_memory="4MB")
    stream = generate_streaming(llm, IDS, ENDLESS, P + 40)
    next(stream)
    llm.close()
    with pytest.raises(RequestFailed, match="from outside"):
        next(stream)


def test_a_row_that_can_not_be_drawn_is_an_error_in_a_stream_at_once(model):
    actor = LateNaN(model, P + 3)
    stream = generate_streaming(actor, IDS, ENDLESS, P + 20, stream_interval=1)
    pieces = []
    with pytest.raises(RequestFailed, match="no token can be drawn"):
        pieces.extend(stream)
    with pytest.raises(RequestFailed, match="no token can be drawn"):
        generate(actor, IDS, ENDLESS, P + 20)


class LateNaN(DictActor):
    def __init__(self, model, length):
        super().__init__(model)
        self.length = length

    def forward(self, input_ids, attention_mask=None):
        logits = self.model(input_ids, attention_mask=attention_mask).logits
        return {"logits": logits * (float("nan") if input_ids.shape[1] >= self.length else 1.0)}


# ---- actors


class SimpleActor:
    """No module at all, and no config."""

    def __init__(self, model):
        self.held = model
        self.calls = []

    def __call__(self, input_ids):
        self.calls.append(tuple(input_ids.shape))
        assert not self.held.training and not torch.is_grad_enabled()
        return {"logits": self.held(input_ids=input_ids).logits}


def test_the_outer_forward_of_an_actor_is_what_runs(model):
    actor = LeastLikely(model)
    out = new(greedy(actor))
    assert out == [by_hand(lambda ids: -model(ids).logits, row, 10) for row in ROWS]
    assert out != new(greedy(model))


def test_an_actor_gets_whole_rows_without_padding_one_by_one(model):
    actor = SimpleActor(copy.deepcopy(model).train())
    out = greedy(actor, length=P + 2)
    assert torch.equal(out, greedy(model, length=P + 2))
    lengths = [len(row) for row in ROWS]
    assert actor.calls[0] == (1, 1)  # to learn its vocabulary
    assert sorted(actor.calls[1:]) == sorted((1, n + step) for n in lengths for step in range(2))
    assert actor.held.training


def test_a_bound_method_is_an_actor_and_its_owner_is_in_eval_mode(model):
    actor = SimpleActor(copy.deepcopy(model).train())
    assert torch.equal(greedy(actor.__call__, length=P + 2), greedy(model, length=P + 2))
    assert actor.held.training


def test_modes_and_gradients_are_as_before_also_after_an_exception(model):
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
def test_an_actors_row_has_the_same_bits_alone_in_a_batch_and_after_evictions(dtype):
    actor = DictActor(make_toy("llama", dtype=dtype, head_dim=10, intermediate_size=100))
    params = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)

    def run(rows, first=0, blocks=64, tokens=64):
        options = EngineOptions(None, None, 4, tokens, 8, None, None, False, None)
        runner = RowsRunner(ActorDecoder(actor, {}), block_size=4, num_blocks=blocks)
        with LLM._over(open_runner(runner, options)) as llm:
            requests = [
                llm.engine.admission.admit(row, params, first_sample=first + i)
                for i, row in enumerate(rows)
            ]
            outputs = [result.outputs[0] for result in llm.engine.run(requests)]
            preemptions.append(llm.stats()["preemptions"])
        return [(output.token_ids, output.logprobs) for output in outputs]

    preemptions = []
    alone = [run([row], first)[0] for first, row in enumerate(ROWS)]
    assert run(ROWS) == alone
    assert run(ROWS, blocks=9, tokens=7) == alone
    assert preemptions[-1] > 0 and not any(preemptions[:-1])


def test_an_actors_arguments_reach_its_forward_at_every_call(model):
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


def test_a_model_that_keeps_an_unknown_state_runs_row_by_row(monkeypatch):
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


def test_what_is_no_generating_model_is_refused(model):
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
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
    for runs, why in refused:
        with pytest.raises(UnsupportedModel, match=why):
            greedy(runs, torch.tensor([[1, 2]]), length=5)
    liar = DictActor(model)
    liar.config = SimpleNamespace(vocab_size=500)
    with pytest.raises(UnsupportedModel, match=r"\[1, 8, 128\].*\[1, 1 or more, 500\]"):
        greedy(liar, IDS[1:2])


# ---- modules with kv_caches


def test_a_module_with_kv_caches_runs_on_the_engine_kept_for_it():
    module = kempner_toy()
    expected = [by_hand(module, row, 10) for row in ROWS]
    assert new(greedy(module)) == expected
    module.calls.clear()
    assert new(greedy(module)) == expected
    # Each token once: its cache is used, and the engine was not opened anew, which takes a trial.
    assert sum(rows * width for rows, width in module.calls) <= sum(len(row) + 9 for row in ROWS)
    *_, last = generate_streaming(module, IDS, ENDLESS, P + 10, do_sample=False)
    assert new(last) == expected
    assert new(greedy(nn.DataParallel(module))) == expected
    with pytest.warns(UserWarning, match="limit is 64"):
        assert greedy(module, length=65).equal(greedy(module, length=64))
    with pytest.raises(InvalidRequest, match="note is not known: Toy is run on the engine's own"):
        greedy(module, note=1)


def test_a_module_with_kv_caches_that_the_engine_can_not_run_is_an_actor_if_it_takes_ids():
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


# ---- wrappers and shards


@pytest.mark.usefixtures("group")
def test_what_data_parallel_wraps_runs_without_a_collective(model, monkeypatch):
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
def test_sharded_models_are_refused_by_name(model):
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


def test_parameters_elsewhere_are_refused(model):
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
def test_the_end_is_that_of_all_ranks(tmp_path):
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


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "bloom", "gemma3"])
def test_our_own_hooks_use_the_models_cache_and_change_nothing(name):
    model = make_toy(name)
    widths, out = widths_of(model, lambda: greedy(model, **OUR_HOOKS))
    assert widths == [P] + [1] * 9
    assert torch.equal(out, greedy(model))
    for name, hook in OUR_HOOKS.items():  # each alone
        assert torch.equal(out, greedy(model, **{name: hook}))
    tok = tokenizer(eos=new(out)[1][3])
    for kwargs in (dict(seed=3, top_k=7), dict(do_sample=False)):
        plain = generate(model, IDS, tok, P + 12, **kwargs)
        hooked = generate(model, IDS, tok, P + 12, **kwargs, **OUR_HOOKS)
        assert torch.equal(plain, hooked)


def methods_of(model):
    """transformers' own, which trainers hand over as hooks."""
    return dict(
        prepare_inputs_fn=model.prepare_inputs_for_generation,
        update_model_kwargs_fn=model._update_model_kwargs_for_generation,
    )


def widths_of(model, run):
    """Columns of `input_ids` in each forward of `model`, and what `run` returned."""
    widths = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        out = run()
    finally:
        handle.remove()
    return widths, out


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt2"])
def test_transformers_own_methods_are_hooks_that_use_the_cache(name):
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


def test_transformers_methods_go_with_an_actor_that_takes_only_what_it_names(model):
    class Strict(DictActor):
        def forward(self, input_ids, attention_mask, position_ids=None, past_key_values=None):
            return self.model(input_ids, attention_mask, position_ids, past_key_values)

    actor = Strict(model)
    actor.config = model.config  # or a forward of one token tells its vocabulary
    widths, out = widths_of(actor, lambda: greedy(actor, **methods_of(model)))
    assert torch.equal(out, greedy(model)) and widths == [P] + [1] * 9


def test_a_prefix_that_is_in_the_cache_alone_stays_there(model):
    prefix, ids = torch.tensor([ROWS[0]] * 2), IDS[[1, 3]]
    with torch.no_grad():
        cache = model(prefix, use_cache=True).past_key_values

    def prepare(input_ids, past=None, **model_kwargs):
        mask = torch.ones(2, prefix.shape[1] + input_ids.shape[1], dtype=torch.int64)
        return {"input_ids": input_ids, "attention_mask": mask, "past_key_values": cache}

    widths, out = widths_of(model, lambda: greedy(model, ids, prepare_inputs_fn=prepare))
    rows = [by_hand(own_logits(model), prefix[0].tolist() + row, 10) for row in ids.tolist()]
    assert new(out) == rows and widths == [P] + [1] * 9


def test_a_cache_that_does_not_go_with_the_ids_is_an_error_and_no_wrong_token(model):
    old = DynamicCache()
    again = dict(length=P + 2, past_key_values=old, **methods_of(model))
    assert torch.equal(greedy(model, **again), greedy(model, length=P + 2))
    with pytest.raises(RequestFailed, match="a cache of 9 tokens and 8 input_ids for 8 tokens"):
        greedy(model, **again)  # begins with the cache that the first call filled

    def hole(input_ids, past=None, **model_kwargs):
        late = input_ids.shape[1] > P + 1
        inputs = prepare_inputs_fn(input_ids, past=past if late else None, **model_kwargs)
        inputs["past_key_values"] = past if late else None
        if late:
            past.crop(-2)
        return inputs

    with pytest.raises(RequestFailed, match="a cache of 7 tokens and 1 input_ids for 10 tokens"):
        greedy(model, prepare_inputs_fn=hole)
    static = StaticCache(model.config, max_cache_len=P + 10)
    with pytest.raises(RequestFailed, match="a mask that is made for all of them"):
        greedy(model, past_key_values=static, **methods_of(model))


@pytest.mark.parametrize("use_cache", [True, False, None])
def test_trainers_arguments_and_other_spellings_change_no_token(llm, model, use_cache):
    seen = []

    class Cached(DictActor):
        def forward(self, input_ids, use_cache=True):
            seen.append(use_cache)
            return self.model(input_ids, use_cache=use_cache)

    trainers = dict(use_cache=use_cache, apply_loss_mask=bool(use_cache))
    expected = greedy(model)
    for runs in (llm, model, DictActor(model), SimpleActor(model), Cached(model)):
        assert torch.equal(greedy(runs, cache_position=torch.arange(P), **trainers), expected)
    assert set(seen) == {False}
    assert new(greedy(kempner_toy(), **trainers)) == new(greedy(kempner_toy()))
    drawn = generate(llm, IDS, TOK, P + 5, seed=3)
    assert torch.equal(generate(llm, IDS, TOK, P + 5, seed=3, do_sample=1, top_k=-1), drawn)
    assert torch.equal(generate(llm, IDS, TOK, P + 5, do_sample=0), greedy(llm, IDS, TOK, P + 5))
    assert not len(_prepare_logits_processor(top_k=-1))


def test_rows_that_have_ended_go_on_with_pads_in_what_hooks_see(model):
    tok = end_at(model, 3)
    seen = []

    def record(input_ids, past=None, **model_kwargs):
        seen.append(input_ids)
        return plain_inputs(input_ids, **model_kwargs)

    out = greedy(model, tok=tok, prepare_inputs_fn=record)
    assert (out[1, P + 3 :] == PAD).all()
    assert all(torch.equal(ids, out[:, : ids.shape[1]]) for ids in seen) and len(seen) == 10


def test_either_hook_works_alone_and_is_handed_the_callers_arguments(model):
    updates, prepared = [], []

    def update(outputs, model_kwargs):
        updates.append((outputs.logits.shape, sorted(model_kwargs)))
        return {**model_kwargs, "step": len(updates)}

    def prepare(input_ids, past=None, step=None, note=None, **model_kwargs):
        prepared.append((step, note))
        return plain_inputs(input_ids, **model_kwargs)

    expected = greedy(model, length=P + 4)
    runs = [(None, update), (prepare, None), (prepare, update)]
    for one, other in runs:
        out = greedy(
            model,
            length=P + 4,
            prepare_inputs_fn=one,
            update_model_kwargs_fn=other,
            note="a note",
        )
        assert torch.equal(out, expected)
    shapes = [shape for shape, _ in updates]
    assert shapes == [(4, P + step, 128) for step in range(4)] * 2
    assert updates[0][1] == ["attention_mask", "note"]
    assert updates[1][1] == ["attention_mask", "note", "step"]
    assert prepared == [(None, "a note")] * 4 + [(step, "a note") for step in (None, 5, 6, 7)]


def test_a_mask_that_the_update_grows_forgets_or_drops_is_as_wide_as_the_ids(model):
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


def test_rows_that_lose_their_blocks_under_hooks_are_computed_anew(gpt2):
    begun = []

    def prepare(input_ids, past=None, **model_kwargs):
        begun.append(past is None)
        return prepare_inputs_fn(input_ids, past=past, **model_kwargs)

    expected = [by_hand(own_logits(gpt2), row, 10) for row in ROWS]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    for blocks, tokens, seats in [(64, 64, 8), (9, 7, 8), (64, 64, 3), (64, 5, 2), (64, 3, 8)]:
        begun.clear()
        options = EngineOptions(None, None, 4, tokens, seats, None, None, False, None)
        hooks = prepare, update_model_kwargs_fn
        mask = (IDS != PAD).long()
        decoder = CallbackDecoder(gpt2, *hooks, IDS, mask, {}, PAD)
        runner = RowsRunner(decoder, block_size=4, num_blocks=blocks)
        with LLM._over(open_runner(runner, options)) as llm:
            results = llm.engine.run(llm._admit_rows(ROWS, params))
            assert [result.outputs[0].token_ids for result in results] == expected
        assert begun[0] and any(begun[1:]) == ((blocks, tokens, seats) != (64, 64, 8))


def test_a_row_that_missed_a_step_is_not_taken_on_behind_a_hole(gpt2):
    hooks = prepare_inputs_fn, update_model_kwargs_fn
    ids = IDS[:2]
    decoder = CallbackDecoder(gpt2, *hooks, ids, (ids != PAD).long(), {}, PAD)

    def logits(**grown):
        """Of both rows' pieces after these tokens; each row keeps its place in the store."""
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
def test_what_a_hook_raises_comes_through_and_the_model_serves_on(model, which):
    error = Mine("of the third step")
    calls = []

    def hook(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return OUR_HOOKS[which](*args, **kwargs)

    model.train()
    for call in (generate, lambda *a, **k: list(generate_streaming(*a, **k))):
        calls.clear()
        with pytest.raises(Mine) as caught:
            call(model, IDS, TOK, P + 10, **{**OUR_HOOKS, which: hook})
        assert caught.value is error
    assert all(layer.training for layer in model.modules())
    model.eval()
    assert greedy(model, **OUR_HOOKS).equal(greedy(model))


def test_a_hook_that_returns_nothing_is_named(model):
    for name in OUR_HOOKS:
        with pytest.raises(
            RequestFailed, match=rf"{name} returned NoneType; it must return a dict"
        ):
            greedy(model, **{**OUR_HOOKS, name: lambda *args, **kwargs: None})


def test_a_pad_beyond_the_vocabulary_is_refused_where_a_model_would_see_it(model):
    beyond = IDS.masked_fill(IDS == PAD, 500)
    tok = tokenizer(eos=None, pad=500)
    expected = new(greedy(model))
    assert new(greedy(model, beyond, tok)) == expected
    assert new(greedy(DictActor(model), beyond, tok)) == expected
    with pytest.raises(InvalidRequest, match="id 500 is outside 0 to 127, and hooks hand"):
        greedy(model, beyond, tok, **OUR_HOOKS)
    with pytest.raises(InvalidRequest, match="id 500 is outside"):
        greedy(model, IDS, tokenizer(eos=None), pad_token_id=500, **OUR_HOOKS)
    alone = greedy(model, IDS[1:2], tok, **OUR_HOOKS)  # a single row is never padded
    assert new(alone) == expected[1:2]


def test_hooks_are_refused_where_they_can_not_work(llm, model):
    with pytest.raises(NotSupported, match="an open LLM makes its own inputs"):
        greedy(llm, **OUR_HOOKS)
    with pytest.raises(NotSupported, match="num_beams=2 with prepare_inputs_fn"):
        greedy(model, num_beams=2, **OUR_HOOKS)
    with pytest.raises(InvalidRequest, match="prepare_inputs_fn='f': must be a function"):
        greedy(model, prepare_inputs_fn="f")
    with pytest.raises(InvalidRequest, match="past is what the hooks are handed anyway"):
        greedy(model, past=None, **OUR_HOOKS)


def test_the_documented_use_of_the_helpers():
    ids, mask = torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])
    assert prepare_inputs_fn(ids)["input_ids"].equal(ids) and set(prepare_inputs_fn(ids)) == {
        "input_ids"
    }
    inputs = prepare_inputs_fn(ids, attention_mask=mask, use_cache=True)
    assert inputs["attention_mask"] is mask and inputs["use_cache"] is True
    assert inputs["position_ids"].tolist() == [[0, 0, 1]]
    pair = torch.zeros(1, 2, 2, 4)  # keys or values of two tokens
    inputs = prepare_inputs_fn(
        ids, past=((pair, pair),), attention_mask=mask, token_type_ids=torch.tensor([[1, 2, 3]])
    )
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
    assert mask.tolist() == [[0, 1, 1]] and len(kwargs) == 3  # the caller's stay as they are


# ---- refused at the door


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
        (dict(token_type_ids=IDS), "token_type_ids is not known"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name_before_anything_runs(llm, change, why):
    before = llm.stats()["forwards"]
    arguments = {"input_ids": IDS, "tokenizer": TOK, "max_length": P + 5, **change}
    for call in (generate, generate_streaming):
        with pytest.raises((InvalidRequest, NotSupported), match=why):
            call(llm, **arguments)
    assert llm.stats()["forwards"] == before


def test_an_end_of_sequence_beyond_the_models_vocabulary_never_comes(model):
    out = greedy(model, tok=tokenizer(eos=500, pad=PAD))
    assert torch.equal(out, greedy(model))

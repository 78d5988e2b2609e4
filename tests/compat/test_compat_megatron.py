"""The Megatron API: its five acceptance tests, and regression tests for defects of the original."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import threading
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import verbatim.compat
import verbatim.engine.engine
from support.programs import in_thread
from support.requests_mixed import facts
from support.toy_tokenizers import byte_level
from support.toys import make_toy, random_ids
from verbatim import LLM, InvalidRequest, NotSupported, PromptTooLong, RequestFailed, VerbatimError
from verbatim import SamplingParams as HouseParams
from verbatim.compat.megatron import (
    AsyncStream,
    DynamicInferenceRequest,
    InferenceRequest,
    SamplingParams,
    Status,
    TextGenerationController,
)

VOCAB = 340
EOD = 2


class MegatronTokenizer:
    """A tokenizer with Megatron's interface, over the byte-level vocabulary of the toys."""

    bos, eod = 1, EOD

    def __init__(self):
        self.hf = byte_level().hf
        self.vocab_size = len(self.hf)

    def tokenize(self, text):
        return list(self.hf(text)["input_ids"])

    def detokenize(self, ids):
        return self.hf.decode(ids)


class SkippingTokenizer(MegatronTokenizer):
    def detokenize(self, ids, skip_special_tokens=False):
        return self.hf.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module")
def model():
    return make_toy("llama", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def hf():
    return byte_level().hf


@pytest.fixture(scope="module")
def llm(model, hf):
    with LLM(model, tokenizer=hf, kv_memory="4MB") as llm:
        yield llm


@pytest.fixture
def controller(llm, hf):
    return TextGenerationController(llm, hf)


def requests_of(*params, prompts=None, kind=InferenceRequest):
    prompts = prompts or [random_ids(4 + 3 * i, i, high=VOCAB) for i in range(len(params))]
    return {
        10 + i: kind(request_id=10 + i, prompt_tokens=prompt, sampling_params=each)
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    }


def run_static(controller, *params, prompts=None):
    done = controller.generate_all_output_tokens_static_batch(requests_of(*params, prompts=prompts))
    return list(done.values())


def run_one(controller, request):
    return controller.generate_all_output_tokens_static_batch({1: request})[1]


def add(controller, requests):
    for request in requests.values():
        controller.inference_context.add_request(request)
    return requests


def run_dynamic(controller, requests, step=None):
    """Step until nothing is left; return the sampled ids of each request, and the result of each step."""
    step = step or controller.generate_output_tokens_dynamic_batch
    add(controller, requests)
    joined, steps = defaultdict(list), []
    while (answer := step()) is not None:
        steps.append(answer)
        join(joined, answer)
    return joined, steps


def join(joined, answer):
    """Append the sampled ids of a step to those of each request."""
    pairs = zip(answer["active_request_ids"].tolist(), answer["sample"].tolist(), strict=True)
    for number, token in pairs:
        joined[number].append(token)


MIXED = (
    dict(top_k=1, num_tokens_to_generate=9, no_early_termination=True),
    dict(temperature=0.8, top_k=30, top_p=0.9, num_tokens_to_generate=7, seed=11),
    dict(temperature=1.3, num_tokens_to_generate=12, seed=12, return_log_probs=True),
)


def mixed():
    return [SamplingParams(**fields) for fields in MIXED]


# ---- the five acceptance tests


def test_dynamic_batch_equals_static_batch_and_generate(llm, controller):
    static = run_static(controller, *mixed())
    native = [
        HouseParams(temperature=0.0, max_tokens=9, ignore_eos=True),
        HouseParams(temperature=0.8, top_k=30, top_p=0.9, max_tokens=7, seed=11),
        HouseParams(temperature=1.3, max_tokens=12, seed=12),
    ]
    plain = llm.generate([request.prompt_tokens for request in static], native)
    counts = {}

    def stop(active):
        for number in active:
            counts[number] = counts.get(number, 0) + 1
        return {number for number in active if number == 11 and counts[number] == 3}

    controller.set_stop_word_finished_ids_callback(stop)
    requests = requests_of(*mixed(), kind=DynamicInferenceRequest)
    joined, steps = run_dynamic(controller, requests)
    for number, request, result in zip((10, 11, 12), static, plain, strict=True):
        ids = result.outputs[0].token_ids
        assert request.generated_tokens.tolist() == ids
        assert joined[number] == (ids[:3] if number == 11 else ids)
        assert requests[number].generated_tokens == joined[number]
        assert requests[number].succeeded()
        assert requests[number].generated_length == len(joined[number])
    finished = torch.cat([step["finished_request_ids"] for step in steps]).tolist()
    assert sorted(finished) == [10, 11, 12]
    assert set(steps[0]) == {
        "active_request_ids", "newly_paused_request_ids", "finished_request_ids", "sample",
        "log_probs", "routing_indices_per_request", "cuda_graph_request_count",
    }  # fmt: skip
    assert len(steps) == 12  # all requests advance in each step
    # Routing is recorded only if the config enables it.
    assert {str(step["routing_indices_per_request"]) for step in steps} == {"None"}
    assert requests[10].routing_indices is controller._router_record_bookkeeping() is None
    assert llm.stats()["blocks_used"] == 0 and llm.stats()["running"] == 0
    first = steps[0]["log_probs"]
    assert first.isnan().tolist() == [True, True, False]
    assert first[2].item() == pytest.approx(plain[2].outputs[0].logprobs[0])


def test_documented_speculative_decoding_examples(controller):
    controller.num_speculative_tokens = 2
    in_prefill = torch.tensor([0, 0, 0, 1, 1])
    rows = controller._get_required_logit_indices(
        in_prefill, torch.tensor([3, 3, 3, 2, 4]), 3, 2, torch.device("cpu")
    )
    assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 14]

    greedy, wide = (1.0, 1, 0.0), (5.0, 0, 0.0)
    controller._torch_sampling_buckets = [((0, 2), *greedy), ((1,), *wide), ((3, 4), *greedy)]
    logits = torch.randn(11, 50, generator=torch.Generator().manual_seed(0))
    logits[3:6] = 0.0
    torch.manual_seed(1)
    tokens, repeats = controller._sample_speculative_logits(logits, in_prefill)
    assert repeats.tolist() == [3, 3, 3, 1, 1]
    greedy_rows = [0, 1, 2, 6, 7, 8, 9, 10]
    assert tokens[greedy_rows].tolist() == logits[greedy_rows].argmax(1).tolist()
    assert tokens.shape == (11,) and len(set(tokens[3:6].tolist())) > 1
    torch.manual_seed(1)
    assert controller._sample_speculative_logits(logits, in_prefill)[0].tolist() == tokens.tolist()

    #       a5 a6s a7s   b3  b4s b5s   c6  c7s c8s   d2   e4
    fed = [50, 60, 70, 30, 40, 55, 61, 71, 81, 20, 44]
    drawn = [60, 99, 98, 40, 55, 97, 96, 81, 95, 33, 45]
    last, mask, inputs = controller._verify_speculative_tokens(
        torch.tensor(drawn), torch.tensor([fed]), in_prefill, repeats, 3, 2, 5
    )
    assert "".join(map(str, mask.int().tolist())) == "110" + "111" + "100" + "1" + "1"
    assert last.tolist() == [1, 5, 6, 9, 10]
    assert inputs.tolist() == fed


def test_draft_verification_does_not_match_across_requests(controller):
    # Request b's base token equals the sample of a's last row; b's draft token matches no sample of its own.
    last, mask, _ = controller._verify_speculative_tokens(
        torch.tensor([5, 7, 8, 9]), torch.tensor([1, 5, 7, 6]), torch.tensor([0, 0]),
        torch.tensor([2, 2]), 2, 0, 2,
    )  # fmt: skip
    assert mask.tolist() == [True, True, True, False] and last.tolist() == [1, 2]
    with pytest.raises(InvalidRequest, match="zeros, then"):
        controller._get_required_logit_indices(torch.tensor([1, 0]), torch.tensor([2, 3]), 1, 1)


@pytest.mark.parametrize("kind", [MegatronTokenizer, SkippingTokenizer])
def test_only_trailing_eods_are_removed_and_bos_is_not_doubled(kind):
    tokenizer, detokenize = kind(), TextGenerationController.detokenize
    ids = [EOD, *tokenizer.tokenize("quick"), EOD, *tokenizer.tokenize("fox"), EOD, EOD]
    before = list(ids)
    skips = dict(skip_special_tokens=False)
    assert detokenize(tokenizer, ids, **skips) == "</s>quick</s>fox"
    assert detokenize(tokenizer, ids, remove_EOD=False, **skips) == "</s>quick</s>fox</s></s>"
    skipped = detokenize(tokenizer, ids)
    assert skipped == ("quickfox" if kind is SkippingTokenizer else "</s>quick</s>fox")
    assert ids == before

    tokenize = TextGenerationController.tokenize_prompt
    plain = tokenizer.tokenize("fox")
    tokenizer.tokenize = lambda text: [1, 1, *plain]
    assert tokenize(tokenizer, "fox") == plain
    assert tokenize(tokenizer, "fox", add_BOS=True) == [1, *plain]
    tokenizer.tokenize = lambda text: list(plain)
    assert tokenize(tokenizer, "fox", add_BOS=True) == [1, *plain]


def test_hugging_face_and_megatron_tokenizers_agree(hf):
    tokenize = TextGenerationController.tokenize_prompt
    detokenize = TextGenerationController.detokenize
    ids = tokenize(hf, "the fox", add_BOS=True)
    assert ids == tokenize(MegatronTokenizer(), "the fox", add_BOS=True) and ids[0] == 1
    assert detokenize(hf, [*ids, EOD]) == "the fox"


def test_tokenizer_ids_may_be_set_after_controller_is_created(model):
    class Late(MegatronTokenizer):
        """Its ids are set after the controller is made."""

        bos = eod = object()

    tokenizer = Late()
    late = TextGenerationController(model, tokenizer)
    tokenizer.bos, tokenizer.eod = 1, EOD
    ids = torch.tensor([*late.tokenize_prompt(tokenizer, "fox"), EOD])
    text, parts = late.detokenize_generations(ids, len(ids), True)
    assert text == "".join(parts) == "fox"


def test_add_bos_with_tokenizer_without_bos_raises_invalid_request():
    class NoBos(MegatronTokenizer):
        @property
        def bos(self):
            raise NotImplementedError

    assert TextGenerationController.tokenize_prompt(NoBos(), "fox")
    with pytest.raises(InvalidRequest, match="no bos"):
        TextGenerationController.tokenize_prompt(NoBos(), "fox", add_BOS=True)


def test_padding_uses_eod_and_eod_in_prompt_does_not_finish_request(controller):
    prompts = [[5, 6], [7]]
    padded = controller.pad_input_prompt_tokens(prompts, 4, 6)
    assert padded.tolist() == [[5, 6, 2, 2, 2, 2], [7, 2, 2, 2, 2, 2], [2] * 6, [2] * 6]
    assert prompts == [[5, 6], [7]]
    assert controller.unpad_input_prompt_tokens(padded, 2).tolist() == padded[:2].tolist()
    with pytest.raises(InvalidRequest, match="don't fit"):
        controller.pad_input_prompt_tokens(prompts, 1, 6)

    greedy = SamplingParams(top_k=1, num_tokens_to_generate=4, no_early_termination=True)
    ends = SamplingParams(top_k=1, num_tokens_to_generate=4)
    with_eod = [5, EOD, 9, EOD]
    free, ended = run_static(controller, greedy, ends, prompts=[with_eod, with_eod])
    length = ended.generated_length
    assert length >= 1
    assert ended.generated_tokens.tolist() == free.generated_tokens.tolist()[:length]

    done, lengths = controller.update_generation_status(
        torch.tensor([[5, 2, 8], [7, 2, 2], [7, 9, 2]]),
        torch.tensor([False, True, True]),
        1,
        torch.tensor([False, False, False]),
        before := torch.tensor([0, 0, 3]),
    )
    assert done.tolist() == [False, True, False] and lengths.tolist() == [0, 0, 4]
    assert before.tolist() == [0, 0, 3] and lengths.dtype == torch.int32


def test_zero_new_tokens_return_prompt_log_probs_of_ragged_prompts(controller, model):
    params = SamplingParams(num_tokens_to_generate=0, return_log_probs=True, top_n_logprobs=2)
    done = run_static(controller, params, params)
    for request in done:
        ids = torch.tensor([request.prompt_tokens])
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0].log_softmax(-1)
        expected = scores[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
        assert len(request.prompt_log_probs) == ids.shape[1] - 1
        found = torch.tensor(request.prompt_log_probs)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert len(request.prompt_top_n_logprobs) == ids.shape[1] - 1
        assert request.generated_log_probs == [] and request.generated_text == ""
        assert request.generated_length == 0 and request.status is Status.COMPLETED


# ---- sampling and limits


def test_dynamic_and_static_batches_draw_same_tokens_from_torch_seed(controller):
    params = [SamplingParams(num_tokens_to_generate=8, temperature=1.5)] * 3
    torch.manual_seed(41)
    static = [r.generated_tokens.tolist() for r in run_static(controller, *params)]
    torch.manual_seed(41)
    joined, _ = run_dynamic(controller, requests_of(*params, kind=DynamicInferenceRequest))
    assert list(joined.values()) == static
    again, _ = run_dynamic(controller, requests_of(*params))
    assert list(again.values()) != static


def test_greedy_is_top_k_1_or_temperature_0(controller):
    fields = dict(num_tokens_to_generate=6, no_early_termination=True)
    hot = SamplingParams(top_k=1, temperature=50.0, **fields)
    cold = SamplingParams(temperature=0.0, **fields)
    prompt = [5, 6, 7]
    one, two = run_static(controller, hot, cold, prompts=[prompt, prompt])
    assert one.generated_tokens.tolist() == two.generated_tokens.tolist()


def test_top_k_and_top_p_work_together(controller):
    # The original asserts that one of them is off, so its server's default top_p rejected every top_k.
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])).repeat(300, 1)
    torch.manual_seed(0)
    cases = ((3, 0.4, {0}), (3, 0.7, {0, 1}), (2, 1.0, {0, 1}), (0, 0.0, {0, 1, 2, 3}))
    for top_k, top_p, kept in cases:
        drawn = controller._torch_sampling_func(logits, 1.0, top_k, top_p)
        assert set(drawn.tolist()) == kept


def test_vocab_size_masks_ids_beyond_it(controller):
    logits = torch.zeros(200, 8)
    logits[:, 7] = 50.0
    before = logits.clone()
    torch.manual_seed(0)
    drawn = controller.sample_from_logits(logits, SamplingParams(), vocab_size=5)
    assert set(drawn.tolist()) == {0, 1, 2, 3, 4} and drawn.dtype == torch.int64
    assert torch.equal(logits, before)
    assert controller.sample_from_logits(logits, SamplingParams(top_k=1), vocab_size=9).eq(7).all()
    with pytest.raises(InvalidRequest, match="vocab_size=0"):
        controller.sample_from_logits(logits, SamplingParams(), vocab_size=0)
    for wrong in (None, torch.zeros(4), torch.tensor(1.0)):
        with pytest.raises(InvalidRequest, match="logits must be"):
            controller.sample_from_logits(wrong, SamplingParams(), vocab_size=5)


def test_sampling_reports_top_n_logprobs_by_text(controller, hf):
    logits = torch.full((2, VOCAB), -5.0)
    logits[0, 40], logits[0, 41], logits[1, 42] = 3.0, 2.0, 1.0
    expected = logits.log_softmax(-1)
    found = {}
    params = SamplingParams(top_k=1, top_n_logprobs=2, skip_prompt_log_probs=True)
    drawn = controller.sample_from_logits(
        logits, params, generation_started=torch.tensor([True, False]), top_n_logprobs_dict=found
    )
    assert drawn.tolist() == [40, 42] and list(found) == [0]
    (entry,) = found[0]
    assert entry[hf.decode([40])] == pytest.approx(expected[0, 40].item(), abs=1e-5)
    assert next(iter(entry)) == hf.decode([40])

    found = {}
    params = SamplingParams(top_k=1, top_n_logprobs=1)
    whole = torch.stack([logits, logits.flip(0)], dim=1)  # [B, S, V]
    controller.sample_from_logits(logits, params, top_n_logprobs_dict=found, logits=whole)
    texts = [[next(iter(entry)) for entry in found[row]] for row in (0, 1)]
    assert texts == [[hf.decode([40]), hf.decode([42])], [hf.decode([42]), hf.decode([40])]]

    found = {}
    values, indices = logits.log_softmax(-1).topk(2)
    controller._update_top_n_logprobs_dict(values, indices, torch.tensor([True, False]), found)
    assert list(found) == [0] and len(found[0][0]) == 2


def test_top_n_logprobs_keep_likeliest_of_ids_with_same_text(controller, hf):
    same = [i for i in range(VOCAB - 10) if hf.decode([i]) == "\ufffd"][:2]
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, same[0]], logits[0, same[1]] = 3.0, 2.0
    found = {}
    params = SamplingParams(top_k=1, top_n_logprobs=2)
    controller.sample_from_logits(logits, params, top_n_logprobs_dict=found)
    likeliest = logits.log_softmax(-1)[0, same[0]].item()
    assert found == {0: [{"\ufffd": pytest.approx(likeliest, abs=1e-5)}]}


def test_sample_from_logits_loop_draws_same_tokens_as_engine(controller, model):
    params = SamplingParams(seed=5, num_tokens_to_generate=5, no_early_termination=True)
    (request,) = run_static(controller, params)
    ids = torch.tensor([request.prompt_tokens])
    for _ in range(5):
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, -1]
        drawn = controller.sample_from_logits(logits, params, position=ids.shape[1])
        ids = torch.cat([ids, drawn[:, None]], dim=1)
    assert ids[0, -5:].tolist() == request.generated_tokens.tolist()
    with pytest.raises(InvalidRequest, match="pass both"):
        controller.sample_from_logits(logits, params)


def test_num_tokens_above_limit_is_clamped_with_warning(controller, llm):
    params = SamplingParams(top_k=1, num_tokens_to_generate=10_000, no_early_termination=True)
    with pytest.warns(UserWarning, match="10000 tokens .* 256"):
        (request,) = run_static(controller, params, prompts=[random_ids(250, 0)])
    assert request.generated_length == 6
    with pytest.raises(PromptTooLong):
        run_static(controller, params, prompts=[random_ids(256, 0)])
    total = SamplingParams(top_k=1, num_tokens_total=9, no_early_termination=True)
    (request,) = run_static(controller, total, prompts=[[5, 6, 7]])
    assert request.generated_length == 6
    with pytest.raises(InvalidRequest, match="num_tokens_total=2"):
        run_static(controller, SamplingParams(num_tokens_total=2), prompts=[[5, 6, 7]])


# ---- defects of the original


def ascii_stop(text, at=3):
    """Return two adjacent ASCII letters or digits of a text, to use as a stop word."""
    pairs = (text[i : i + 2] for i in range(at, len(text) - 1))
    return next(pair for pair in pairs if pair.isascii() and pair.isalnum())


def free_params(**fields):
    return SamplingParams(num_tokens_to_generate=40, no_early_termination=True, **fields)


def free_run(controller, **fields):
    return run_static(controller, free_params(**fields))[0]


def test_stop_word_is_cut_from_text_but_not_from_tokens_and_log_probs(controller):
    fields = dict(seed=4, return_log_probs=True, top_n_logprobs=3)
    free = free_run(controller, **fields)
    stop = ascii_stop(free.generated_text)
    params = free_params(stop_words=[stop], **fields)
    (request,) = run_static(controller, params)
    length = request.generated_length
    assert request.generated_text == free.generated_text[: free.generated_text.index(stop)]
    assert request.generated_tokens.tolist() == free.generated_tokens.tolist()[:length]
    assert len(request.generated_log_probs) == len(request.generated_top_n_logprobs) == length < 40
    assert request.generated_log_probs == free.generated_log_probs[:length]
    params.detokenize_stop_sequence = True
    (kept,) = run_static(controller, params)
    assert kept.generated_text == request.generated_text + stop


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_routing_is_recorded_per_step_and_request_across_preemptions(draft):
    """Preempted, drafted and stopped requests report the same routing as a plain forward."""
    moe = make_toy("qwen3_moe", vocab_size=VOCAB)
    moe.config.moe_enable_routing_replay = True
    prompts = [([7, 8, 9] * 7)[:20], *(random_ids(20, i, high=VOCAB) for i in range(4))]
    fields = dict(num_tokens_to_generate=40, termination_id=-1)
    params = [SamplingParams(seed=i, top_k=int(i == 0), **fields) for i in range(5)]
    with LLM(moe, kv_memory="4MB") as roomy:
        text_controller = TextGenerationController(roomy)
        whole = run_static(text_controller, *params, prompts=prompts)
        size = roomy.info()["kv_bytes_per_token"] * 8 * 17
        record = HouseParams(max_tokens=0, record_routing=True)
        for request in whole:
            ids = [*request.prompt_tokens, *request.generated_tokens.tolist()][:-1]
            (plain,) = roomy.generate([ids], record)
            assert request.routing_indices.equal(plain.outputs[0].routing)
            assert request.routing_indices.shape == (59, 3, 2)
    options = dict(kv_memory=size, block_size=8, prefix_cache=False)
    with LLM(moe, draft=draft, num_draft_tokens=draft and 3, **options) as tight:
        text_controller = TextGenerationController(tight)
        requests = requests_of(*params, prompts=prompts, kind=DynamicInferenceRequest)
        text_controller.set_stop_word_finished_ids_callback(
            lambda ids: [i for i in ids if i == 11 and len(requests[i].generated_tokens) == 9]
        )
        add(text_controller, requests)
        parts, paused, running = defaultdict(list), set(), True
        while running:
            text_controller.inference_context.step()
            seen = text_controller._router_record_bookkeeping()
            answer = text_controller.generate_output_tokens_dynamic_batch()
            running = answer is not None
            paused |= set(answer["newly_paused_request_ids"].tolist()) if running else set()
            if running and answer["routing_indices_per_request"]:
                routing = answer["routing_indices_per_request"]
                assert list(routing) == answer["active_request_ids"].tolist() == list(seen)
                assert all(routing[i].equal(seen[i]) for i in routing)
                for number, rows in routing.items():
                    parts[number].append(rows)
        assert tight.stats()["preemptions"] > 0 and paused and paused <= set(requests)
        assert draft is None or tight.stats()["draft"]["accepted"] > 0
    for number, request in requests.items():
        want = whole[number - 10].routing_indices
        if number == 11:
            want = want[:28]
        assert request.routing_indices.equal(want)
        assert torch.cat(parts[number]).equal(want)


def test_skip_prompt_log_probs_in_static_and_dynamic_requests(controller):
    prompt = random_ids(50, 3, high=VOCAB)
    params = SamplingParams(
        num_tokens_to_generate=5, seed=1, return_log_probs=True, top_n_logprobs=2,
        skip_prompt_log_probs=True, no_early_termination=True,
    )  # fmt: skip
    (static,) = run_static(controller, params, prompts=[prompt])
    assert len(static.prompt_log_probs) == 49 and static.prompt_top_n_logprobs is None
    assert len(static.generated_log_probs) == len(static.generated_top_n_logprobs) == 5
    # Prefixes of a live module stay cached only while a request runs.
    long = SamplingParams(top_k=1, num_tokens_to_generate=20, no_early_termination=True)
    holder = InferenceRequest(request_id=0, prompt_tokens=prompt, sampling_params=long)
    controller.inference_context.add_request(holder)
    controller.generate_output_tokens_dynamic_batch()
    dynamic = DynamicInferenceRequest(request_id=1, prompt_tokens=prompt, sampling_params=params)
    run_dynamic(controller, {1: dynamic})
    assert dynamic.prompt_log_probs is None and dynamic.prompt_top_n_logprobs is None
    assert dynamic.generated_log_probs == static.generated_log_probs
    assert dynamic.generated_top_n_logprobs == static.generated_top_n_logprobs
    assert dynamic.num_cached_tokens > 0


# ---- fields


def test_termination_id_finishes_request_and_stays_in_tokens(controller):
    free = free_run(controller, seed=4)
    ids = free.generated_tokens.tolist()
    params = SamplingParams(
        num_tokens_to_generate=40, seed=4, termination_id=ids[6], return_log_probs=True
    )
    (request,) = run_static(controller, params)
    length = ids.index(ids[6]) + 1
    assert request.generated_tokens.tolist() == ids[:length]
    assert request.generated_sequence_lengths.tolist() == [length]
    params.termination_id = -1
    (request,) = run_static(controller, params)
    assert request.generated_length == 40


def test_detokenize_stop_sequence_keeps_eod_text_also_in_streams(llm):
    tokenizer = MegatronTokenizer()
    text_controller = TextGenerationController(llm, tokenizer)
    tokenizer.eod = token = free_run(text_controller, seed=4).generated_tokens.tolist()[3]
    text_controller = TextGenerationController(llm, tokenizer)
    params = SamplingParams(num_tokens_to_generate=40, seed=4)
    (without,) = run_static(text_controller, params)
    params.detokenize_stop_sequence = True
    requests, stream = requests_of(params), AsyncStream(10, lambda: None)
    request = text_controller.generate_all_output_tokens_static_batch(requests, {10: stream})[10]
    assert request.generated_tokens.tolist() == without.generated_tokens.tolist()
    assert request.generated_tokens.tolist()[-1] == token
    assert request.generated_text == without.generated_text + tokenizer.detokenize([token])
    assert read_texts(stream)[-1] == request.generated_text


def test_segments_join_to_generated_text(controller):
    params = SamplingParams(num_tokens_to_generate=12, seed=4, return_segments=True)
    (request,) = run_static(controller, params)
    assert len(request.generated_segments) == request.generated_length
    assert "".join(request.generated_segments) == request.generated_text
    assert len(request.segments) == request.prompt_length + request.generated_length
    assert request.text.endswith(request.generated_text)


def test_rows_are_detokenized_by_their_lengths(controller):
    ids = torch.tensor([random_ids(6, 1, high=VOCAB), random_ids(6, 2, high=VOCAB)])
    text, parts = controller.detokenize_generations(ids[0], torch.tensor([3]), False)
    assert parts is None
    assert text == controller.detokenize(controller.tokenizer, ids[0, :3].tolist())
    text, parts = controller.detokenize_generations(ids[0], torch.tensor(6), True)
    assert "".join(parts) == text
    lengths = torch.tensor([3, 6])
    rows = [controller.detokenize_generations(ids[b], lengths[b], True) for b in range(2)]
    texts, parts = controller.detokenize_generations(ids, lengths, True)
    assert (texts, parts) == ([text for text, _ in rows], [part for _, part in rows])
    assert controller.detokenize_generations(ids, lengths, False) == (texts, None)
    assert controller.detokenize_generations(ids[:1], lengths[:1], False) == (texts[:1], None)
    for wrong in (None, [[1, 2]], torch.zeros(2)):
        with pytest.raises(InvalidRequest, match="must be a tensor of ids"):
            controller.detokenize_generations(wrong, 1, False)
    for wrong in (torch.tensor([3]), torch.tensor([3, 7]), torch.tensor([-1, 3])):
        with pytest.raises(InvalidRequest, match="each 0 to L"):
            controller.detokenize_generations(ids, wrong, False)


def test_replaced_tokenizer_takes_effect_everywhere(controller, llm):
    class Shouting(MegatronTokenizer):
        def tokenize(self, text):
            return super().tokenize(text.upper())

        def detokenize(self, ids):
            return super().detokenize(ids).upper()

    other, params = Shouting(), SamplingParams(top_k=1, num_tokens_to_generate=4)
    first, request, expected = (
        InferenceRequest(request_id=1, prompt="dog", sampling_params=params) for _ in range(3)
    )
    controller.inference_context.add_request(first)
    with pytest.raises(InvalidRequest, match="holds 1 requests"):
        controller.tokenizer = other
    while controller.generate_output_tokens_dynamic_batch() is not None:
        pass
    controller.tokenizer = other
    run_one(controller, request)
    run_one(TextGenerationController(llm, other), expected)
    assert list(request.prompt_tokens) == other.tokenize("dog") == list(expected.prompt_tokens)
    assert request.text == expected.text and controller.tokenizer is other
    ids = request.generated_tokens
    text, _ = controller.detokenize_generations(ids, len(ids), False)
    assert text == controller.detokenize(other, ids.tolist())


def test_prompt_may_be_text_or_ids_and_text_starts_with_it(controller, hf):
    ids = hf("the lazy dog", add_special_tokens=False)["input_ids"]
    params = SamplingParams(
        top_k=1, num_tokens_to_generate=3, add_BOS=True, return_prompt_tokens=True
    )
    request = InferenceRequest(request_id=1, prompt="the lazy dog", sampling_params=params)
    run_one(controller, request)
    assert request.prompt_tokens == [1, *ids]
    assert request.text == "the lazy dog" + request.generated_text
    assert len(request.tpot) == request.generated_length
    for prompt in ("the lazy dog", "something else", None):
        request = InferenceRequest(
            request_id=1, prompt=prompt, prompt_tokens=ids, sampling_params=params
        )
        run_one(controller, request)
        assert request.text == (prompt or "the lazy dog") + request.generated_text
        assert request.prompt_tokens is ids
    (request,) = run_static(controller, SamplingParams(top_k=1, detokenize_generations=False))
    assert request.generated_text is None and len(request.generated_tokens) > 0


REFUSED = [
    dict(streaming_interval=0), dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_p=1.5),
    dict(top_p=torch.ones(2)), dict(streaming=torch.ones(2)), dict(top_k=-1), dict(top_k=2.0),
    dict(num_tokens_to_generate=-1), dict(num_tokens_to_generate=3, num_tokens_total=9),
    dict(termination_id=-2), dict(top_n_logprobs=-1), dict(top_n_logprobs=2000), dict(seed=2**63),
    dict(stop_words="the"),
    dict(add_BOS=1), dict(return_prompt_top_n_logprobs=True),
    dict(return_prompt_top_n_logprobs=True, top_n_logprobs=2, skip_prompt_log_probs=True),
]  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED)
def test_invalid_sampling_params_are_rejected(fields):
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        SamplingParams(**fields)


def test_numpy_and_torch_scalars_are_accepted(controller):
    fields = dict(temperature=0.5, top_p=0.25, top_k=3, top_n_logprobs=1, seed=4)
    kinds = (np.float32, np.float64, np.int64, np.int32, torch.tensor)
    theirs = {name: kind(fields[name]) for name, kind in zip(fields, kinds, strict=True)}
    params = SamplingParams(num_tokens_to_generate=np.int16(4), **theirs)
    ours = SamplingParams(num_tokens_to_generate=4, **fields)
    assert params == ours and all(type(getattr(params, n)) is type(v) for n, v in fields.items())
    mine, other = run_static(controller, params, ours, prompts=[[5, 6], [5, 6]])
    assert mine.generated_tokens.tolist() == other.generated_tokens.tolist()
    for bad in (dict(top_k=np.float32(2)), dict(temperature=np.bool_(True)), dict(seed=np.True_)):
        with pytest.raises(InvalidRequest, match=next(iter(bad))):
            SamplingParams(**bad)


def test_modified_params_are_validated_when_submitted(controller):
    params = SamplingParams()
    params.streaming = True
    with pytest.raises(NotSupported, match="streaming"):
        run_static(controller, params)
    with pytest.raises(AttributeError):
        params.min_length = 4
    with pytest.raises(NotSupported, match="min_length"):
        params.add_attributes({"top_k": 3, "min_length": 4})
    assert params.top_k == 0
    params.streaming = False
    params.add_attributes({"top_n_logprobs": 2, "top_k": 3})
    assert params.return_prompt_top_n_logprobs and params.top_k == 3
    with pytest.warns(DeprecationWarning, match="return_prompt_top_n_logprobs"):
        SamplingParams(top_n_logprobs=1, return_prompt_top_n_logprobs=True)


def test_params_survive_serialization():
    for fields in (*MIXED, dict(top_n_logprobs=2, stop_words=["a"], streaming_interval=8)):
        params = SamplingParams(**fields)
        assert SamplingParams.deserialize(params.serialize()) == params


def test_unsupported_and_invalid_requests_are_rejected(controller):
    def request(**fields):
        return InferenceRequest(**{"request_id": 1, "prompt_tokens": [5]} | fields)

    add_request = controller.inference_context.add_request
    run, sample = controller.generate_all_output_tokens_static_batch, controller.sample_from_logits
    logits, stream = torch.zeros(1, 4), AsyncStream(1, lambda: None)
    segments = SamplingParams(return_segments=True, detokenize_generations=False)
    unknown_end = SamplingParams(termination_id=2**31)
    for message, call in {
        "encoder_prompt": lambda: add_request(request(encoder_prompt="x")),
        "prompt=3: must be": lambda: add_request(request(prompt=3)),
        f"termination_id={2**31}": lambda: add_request(request(sampling_params=unknown_end)),
        "prefill_chunk_length": lambda: add_request(request(), prefill_chunk_length=4),
        "neither": lambda: add_request(InferenceRequest(request_id=1)),
        "must be Megatron's": lambda: add_request(request(sampling_params=HouseParams())),
        "return_segments": lambda: add_request(request(sampling_params=segments)),
        "request_id='x'": lambda: add_request(request(request_id="x")),
        "request_id=": lambda: add_request(request(request_id=2**70)),
        "prompt_tokens=5": lambda: add_request(request(prompt_tokens=5)),
        r"prompt_tokens=tensor\(5\)": lambda: add_request(request(prompt_tokens=torch.tensor(5))),
        "sampling_params=tensor": lambda: add_request(request(sampling_params=torch.ones(2))),
        "active_requests is NoneType": lambda: run(None),
        "'a': must be an InferenceRequest": lambda: run({1: "a"}),
        "active_streams is list": lambda: run({1: request()}, [3]),
        "active_requests is list": lambda: run([], {1: stream}),
        "vocab_size='x'": lambda: sample(logits, vocab_size="x"),
        "sampling_params='x'": lambda: sample(logits, sampling_params="x"),
        "speed": lambda: sample(logits, speed=3),
        "must be an LLM": lambda: TextGenerationController(object(), None),
        "tokenizer='gpt2': must be Hugging": lambda: setattr(controller, "tokenizer", "gpt2"),
    }.items():
        unsupported = message in ("encoder_prompt", "prefill_chunk_length", "speed")
        with pytest.raises(NotSupported if unsupported else InvalidRequest, match=message):
            call()
    assert stream.finished and not controller.inference_context.has_unfinished_requests()
    add_request(request())
    with pytest.raises(InvalidRequest, match="in use"):
        add_request(request())
    controller.inference_context.reset()
    assert controller.generate_output_tokens_dynamic_batch() is None
    with pytest.warns(DeprecationWarning, match="sampling_params"):
        InferenceRequest(request_id=1, inference_parameters=SamplingParams())


# ---- kinds of models and tokenizers


@pytest.mark.parametrize("kind", ["wrapper", "megatron tokenizer"])
def test_wrapper_and_megatron_tokenizer_generate_same_results(kind, model, llm, hf):
    free, params = free_run(TextGenerationController(llm, hf), seed=4), free_params(seed=4)
    params.stop_words = [ascii_stop(free.generated_text)]
    params.return_segments = True
    (expected,) = run_static(TextGenerationController(llm, hf), params)
    context = SimpleNamespace(max_sequence_length=50)
    wrapper = SimpleNamespace(model=model, inference_context=context)
    given = wrapper if kind == "wrapper" else model
    tokenizer = MegatronTokenizer() if kind == "megatron tokenizer" else hf
    text_controller = TextGenerationController(given, tokenizer)
    (request,) = run_static(text_controller, params)
    assert request.generated_tokens.tolist() == expected.generated_tokens.tolist()
    assert request.generated_text == expected.generated_text
    assert len(request.generated_segments) == request.generated_length
    assert "".join(request.generated_segments) == "".join(expected.generated_segments)
    if kind == "wrapper":
        assert wrapper.inference_context is text_controller.inference_context
        assert text_controller.inference_context.max_sequence_length == 50
        params.stop_words = None
        params.num_tokens_to_generate = 100
        with pytest.warns(UserWarning, match="limit of 50"):
            assert run_static(text_controller, params)[0].generated_length == 46
        long = InferenceRequest(request_id=1, prompt_tokens=[5] * 51, sampling_params=params)
        with pytest.raises(PromptTooLong, match="max_sequence_length"):
            text_controller.generate_all_output_tokens_static_batch({1: long})


class StepWrapper:
    """A wrapper as Megatron's: only `run_one_forward_step` returns logits."""

    def __init__(self, run, **more):
        self._run, self.lengths = run, []
        self.inference_context = SimpleNamespace(max_sequence_length=50, is_own=True)
        vars(self).update(more)

    def run_one_forward_step(self, inputs):
        names = ("tokens", "position_ids", "attention_mask")
        tokens, positions, mask = (inputs[name] for name in names)
        length = tokens.shape[1]
        assert positions.tolist() == [list(range(length))] and self.inference_context.is_own
        assert mask[0, 0].equal(torch.ones(length, length).triu(1).bool())
        self.lengths.append(length)
        return self._run(tokens, position_ids=positions).logits


def test_wrapper_with_own_forward_step_runs_row_by_row(model, llm, hf):
    wrapper = StepWrapper(model)
    text_controller = TextGenerationController(wrapper, hf)
    params = SamplingParams(num_tokens_to_generate=12, top_k=1, return_log_probs=True)
    expected = run_static(TextGenerationController(llm, hf), params)
    requests = run_static(text_controller, params)
    for request, same in zip(requests, expected, strict=True):
        assert request.generated_tokens.tolist() == same.generated_tokens.tolist()
        assert request.generated_log_probs == pytest.approx(same.generated_log_probs, abs=1e-4)
    assert wrapper.inference_context is text_controller.inference_context
    assert text_controller.inference_context.max_sequence_length == 50
    assert max(wrapper.lengths) == max(r.prompt_length for r in requests) + 11
    joined, _ = run_dynamic(text_controller, requests_of(params))
    assert joined[10] == expected[0].generated_tokens.tolist()


def test_optional_preparation_methods_of_wrapper_are_called(model, hf):
    calls = []

    def window(inputs, start, end):
        calls.append((start, end))
        return {name: value[..., start:end] for name, value in inputs.items()}

    plain = StepWrapper(model)
    wrapper = StepWrapper(
        model,
        model=torch.nn.Linear(1, 1),  # no model that the engine can run
        prep_model_for_inference=lambda prompts_tokens=None: calls.append(prompts_tokens.shape[1]),
        get_batch_for_context_window=window,
    )
    params = SamplingParams(num_tokens_to_generate=4, top_k=1)
    (request,) = run_static(TextGenerationController(wrapper, hf), params)
    (same,) = run_static(TextGenerationController(plain, hf), params)
    assert request.generated_tokens.tolist() == same.generated_tokens.tolist()
    assert calls[-2:] == [request.prompt_length + 3, (0, request.prompt_length + 3)]


def test_request_reset_during_prefill_reports_no_prompt_log_probs(model, hf):
    with LLM(model, tokenizer=hf, kv_memory="4MB", max_batch_tokens=8) as llm:
        text_controller = TextGenerationController(llm, hf)
        params = SamplingParams(num_tokens_to_generate=2, top_k=1, return_log_probs=True)
        request = DynamicInferenceRequest(
            request_id=1, prompt_tokens=random_ids(30, 1), sampling_params=params
        )
        text_controller.inference_context.add_request(request)
        answer = text_controller.generate_output_tokens_dynamic_batch()
        assert len(answer["active_request_ids"]) == 0 and len(answer["sample"]) == 0
        text_controller.inference_context.reset()
        assert request.prompt_log_probs is None and request.generated_log_probs == []
        assert llm.stats()["blocks_used"] == 0


def test_controller_without_tokenizer_generates_ids_only(model):
    with LLM(model, kv_memory="4MB") as llm:
        text_controller = TextGenerationController(llm)
        (request,) = run_static(text_controller, SamplingParams(num_tokens_to_generate=3, top_k=1))
        assert request.generated_length == 3 and request.generated_text is None
        for fields in (dict(stop_words=["a"]), dict(top_n_logprobs=1), dict(return_segments=True)):
            with pytest.raises(InvalidRequest, match="needs a tokenizer"):
                run_static(text_controller, SamplingParams(**fields))


def test_prep_inference_input_returns_positions_and_mask(controller):
    tokens = torch.tensor([[5, 6, 7], [7, 8, 9]])
    inputs = controller.prep_inference_input(tokens, {})
    assert inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert inputs["attention_mask"] is None and inputs["tokens"] is tokens
    mask = controller.prep_inference_input(tokens, {}, use_attention_mask=True)["attention_mask"]
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    controller.inference_wrapped_model.prep_inference_input = lambda tokens: {"mine": tokens}
    assert "mine" in controller.prep_inference_input(tokens, {})


# ---- steps


def test_skip_bookkeeping_returns_step_without_committing_it(controller, llm):
    expected, _ = run_dynamic(controller, requests_of(*mixed()))
    requests = add(controller, requests_of(*mixed(), kind=DynamicInferenceRequest))

    def peek():
        step = controller.async_generate_output_tokens_dynamic_batch
        return asyncio.run(step(skip_bookkeeping=True))

    joined = {number: [] for number in requests}
    while (seen := peek()) is not None:
        again, committed = peek(), controller.generate_output_tokens_dynamic_batch()
        for key in ("active_request_ids", "sample"):
            assert seen[key].tolist() == again[key].tolist() == committed[key].tolist()
        assert len(seen["finished_request_ids"]) == 0
        join(joined, committed)
    assert joined == expected and llm.stats()["blocks_used"] == 0


@pytest.mark.parametrize("how", ["loop", "running loop", "dummy forwards", "paused"])
def test_every_way_of_stepping_samples_same_tokens(controller, llm, how):
    expected, _ = run_dynamic(controller, requests_of(*mixed()))
    step, calls = controller.generate_output_tokens_dynamic_batch, []
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(asyncio.Runner()).get_loop() if "loop" in how else None
        if how == "running loop":
            thread = threading.Thread(target=loop.run_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(loop.call_soon_threadsafe, loop.stop)
        if how == "paused":
            llm.pause()
            timer = threading.Timer(0.3, llm.resume)
            timer.start()
            stack.callback(timer.join)

        def one_step():
            calls.append(1)
            if how == "dummy forwards":
                before = llm.stats()
                controller.dummy_forward()
                assert llm.stats() == before | {"forwards": before["forwards"] + 1}
            return step(loop=loop)

        assert run_dynamic(controller, requests_of(*mixed()), one_step)[0] == expected
    assert len(calls) < 20  # 13 that make a step, and one or two that wait until it is resumed


def test_synchronous_step_inside_its_event_loop_raises(controller):
    async def inside():
        with pytest.raises(VerbatimError, match="await"):
            controller.generate_output_tokens_dynamic_batch(asyncio.get_running_loop())

    asyncio.run(inside())


def test_steps_driven_by_other_calls_lose_no_token(controller, llm):
    expected, _ = run_dynamic(controller, requests_of(*mixed()))
    requests = add(controller, requests_of(*mixed()))
    before = facts(llm.generate([[9, 8, 7]], HouseParams(max_tokens=30, seed=1))[0])
    peek = controller.async_generate_output_tokens_dynamic_batch(skip_bookkeeping=True)
    assert asyncio.run(peek)["sample"].tolist() == [ids[0] for ids in expected.values()]
    while controller.generate_output_tokens_dynamic_batch() is not None:
        pass
    assert all(r.status is Status.COMPLETED for r in requests.values())
    assert {n: r.generated_tokens.tolist() for n, r in requests.items()} == expected
    assert facts(llm.generate([[9, 8, 7]], HouseParams(max_tokens=30, seed=1))[0]) == before


def test_steps_in_several_threads_lose_no_token(controller, llm):
    expected, _ = run_dynamic(controller, requests_of(*mixed()))
    params = HouseParams(max_tokens=60)
    others = [in_thread(llm.generate, [[9, 8, i]] * 3, params) for i in range(3)]
    for _ in range(8):
        assert run_dynamic(controller, requests_of(*mixed()))[0] == expected
    for other in others:
        other.result()


def test_failed_forward_fails_all_requests_of_batch(controller, llm, monkeypatch):
    runner = llm.engine.runner
    plain, calls = runner.forward, []

    def broken(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("out of order")
        return plain(batch)

    monkeypatch.setattr(runner, "forward", broken)
    requests = requests_of(*mixed(), kind=DynamicInferenceRequest)
    _, steps = run_dynamic(controller, requests)
    assert sorted(steps[-1]["finished_request_ids"].tolist()) == [10, 11, 12]
    assert all(r.failed() and "out of order" in str(r.error) for r in requests.values())
    calls[:] = [None]
    with pytest.raises(RuntimeError, match="out of order"):
        run_static(controller, *mixed())


def test_requests_may_be_added_during_steps(controller):
    context, total = controller.inference_context, 600
    params = SamplingParams(num_tokens_to_generate=2, top_k=1, no_early_termination=True)
    kind = partial(DynamicInferenceRequest, prompt_tokens=[5, 6], sampling_params=params)
    requests = {i: kind(request_id=i) for i in range(total)}
    finished, joined = [], defaultdict(list)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        adding = in_thread(lambda: [context.add_request(each) for each in requests.values()])
        while len(finished) < total:
            if (answer := controller.generate_output_tokens_dynamic_batch()) is not None:
                finished += answer["finished_request_ids"].tolist()
                join(joined, answer)
        adding.result()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(finished) == list(range(total)) and not context.requests
    assert all(request.succeeded() for request in requests.values())
    assert joined == {i: request.generated_tokens for i, request in requests.items()}
    assert len({tuple(ids) for ids in joined.values()}) == 1


def test_raising_stop_callback_loses_no_token(controller):
    expected, _ = run_dynamic(controller, requests_of(*mixed()))
    calls = []

    def broken(active):
        calls.append(active)
        if len(calls) % 3 == 2:
            raise ValueError("callback")

    def step():
        try:
            return controller.generate_output_tokens_dynamic_batch()
        except ValueError:
            return controller.generate_output_tokens_dynamic_batch()

    controller.set_stop_word_finished_ids_callback(broken)
    requests = requests_of(*mixed(), kind=DynamicInferenceRequest)
    joined, steps = run_dynamic(controller, requests, step)
    assert joined == expected and len(calls) > len(steps)
    assert {n: request.generated_tokens for n, request in requests.items()} == expected
    finished = torch.cat([answer["finished_request_ids"] for answer in steps])
    assert sorted(finished.tolist()) == [10, 11, 12]


# ---- reused requests


def test_reused_request_keeps_no_previous_results(controller):
    full = SamplingParams(
        num_tokens_to_generate=3, return_log_probs=True, return_segments=True, top_n_logprobs=2
    )
    plain = SamplingParams(num_tokens_to_generate=6, seed=1, no_early_termination=True)
    request = DynamicInferenceRequest(request_id=1, prompt="The fox", sampling_params=full)
    run_one(controller, request)
    assert len(request.generated_log_probs) == len(request.generated_segments) == 3
    request.prompt, request.sampling_params, request.error = "Another", plain, ValueError("old")
    run_one(controller, request)
    fresh = DynamicInferenceRequest(request_id=1, prompt="Another", sampling_params=plain)
    run_one(controller, fresh)
    assert request.succeeded() and request.text == fresh.text
    assert request.text == "Another" + request.generated_text
    timed = {"arrival_time", "tpot", "ttft", "latency", "num_cached_tokens"}
    for field in dataclasses.fields(InferenceRequest):
        if field.name not in timed and "generated_tokens" not in field.name:
            mine, other = getattr(request, field.name), getattr(fresh, field.name)
            assert torch.equal(mine, other) if torch.is_tensor(mine) else mine == other, field.name
    assert request.generated_tokens == fresh.generated_tokens and len(request.tpot) == 6


# ---- streams


async def items_of(stream):
    return [item async for item in stream.generator()]


def read(stream):
    return asyncio.run(asyncio.wait_for(items_of(stream), 10))


def read_texts(stream):
    return [item.generated_text for item in read(stream)]


@pytest.mark.parametrize("when", ["during the run", "after it"])
def test_streamed_results_show_output_of_their_step(controller, when):
    requests = requests_of(*(SamplingParams(**fields, return_segments=True) for fields in MIXED))
    streams = {key: AsyncStream(key, lambda: None) for key in (10, 11, "12")}
    expected = run_static(controller, *mixed())

    async def main():
        run = controller.generate_all_output_tokens_static_batch, requests, streams
        if when == "after it":
            run[0](*run[1:])
        readers = [asyncio.create_task(items_of(stream)) for stream in streams.values()]
        if when == "during the run":
            await asyncio.to_thread(*run)
        return await asyncio.gather(*readers)

    seen = asyncio.run(main())
    for request, other, items in zip(requests.values(), expected, seen, strict=True):
        assert request.generated_tokens.tolist() == other.generated_tokens.tolist()
        lengths = [item.generated_length for item in items]
        assert lengths == sorted(set(lengths)) and lengths[-1] == request.generated_length
        assert len(lengths) > 1
        for item in items:
            length = item.generated_length
            assert item.status is Status.ACTIVE_AND_GENERATING_TOKENS and item.text is None
            assert item.generated_tokens.tolist() == request.generated_tokens.tolist()[:length]
            log_probs = request.generated_log_probs
            assert item.generated_log_probs == (log_probs and log_probs[:length])
            assert request.generated_text.startswith(item.generated_text)
        assert items[-1].generated_text == request.generated_text
        assert items[-1].generated_segments == request.generated_segments
        assert items[0].generated_segments == request.generated_segments[: lengths[0]]


@pytest.mark.parametrize(
    ("keys", "prompts"), [([99], None), ([10, "10"], None), ([10], [[5], [6], []])]
)
def test_streams_of_rejected_batch_raise_its_error(controller, keys, prompts):
    requests = requests_of(*mixed(), prompts=prompts)
    streams = {key: AsyncStream(10, lambda: None) for key in keys}
    before = torch.get_rng_state()
    with pytest.raises(InvalidRequest, match=None if prompts else "active_streams") as refused:
        controller.generate_all_output_tokens_static_batch(requests, streams)
    assert prompts or torch.equal(torch.get_rng_state(), before)
    for stream in streams.values():
        with pytest.raises(InvalidRequest) as raised:
            read_texts(stream)
        assert raised.value is refused.value
    assert [request.status for request in requests.values()] == [None] * 3


def fail_token(monkeypatch, seed, at):
    """Make the request with `seed` fail at the commit that follows its first `at` tokens."""
    plain = verbatim.engine.engine.commit

    def commit(chunk, *rest):
        sequence = chunk.sequence
        if sequence.request.seed == seed and len(sequence.output_ids) == at:
            raise RequestFailed("that one")
        return plain(chunk, *rest)

    monkeypatch.setattr(verbatim.engine.engine, "commit", commit)


def run_failing(controller, requests, streamed, expected, error, match):
    """Run a static batch, in which only the second request fails; streams show that, too."""
    streams = {number: AsyncStream(number, lambda: None) for number in streamed}
    with pytest.raises(error, match=match) as raised:
        controller.generate_all_output_tokens_static_batch(requests, streams)
    statuses = [request.status for request in requests.values()]
    assert statuses == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert [request.error for request in requests.values()] == [None, raised.value, None]
    for number, other in zip((10, 12), (expected[0], expected[2]), strict=True):
        assert requests[number].generated_tokens.tolist() == other.generated_tokens.tolist()
        assert requests[number].generated_sequence_lengths.tolist() == [9, 0, 12]
        if number in streams:
            assert read_texts(streams[number])[-1] == other.generated_text
    if 11 in streams:
        with pytest.raises(error, match=match):
            read_texts(streams[11])


@pytest.mark.parametrize("streamed", [[], [10, 11, 12]])
def test_failed_request_of_static_batch_does_not_fail_others(controller, monkeypatch, streamed):
    expected = run_static(controller, *mixed())
    fail_token(monkeypatch, seed=11, at=3)
    run_failing(controller, requests_of(*mixed()), streamed, expected, RequestFailed, "that one")


@pytest.mark.parametrize("at", [3, 7])
def test_detokenizer_error_of_one_request_does_not_fail_others(llm, at):
    """The tokenizer raises at a token in the middle, or at the last one."""
    expected = run_static(TextGenerationController(llm, MegatronTokenizer()), *mixed())
    token = expected[1].generated_tokens.tolist()[at - 1]

    class Broken(MegatronTokenizer):
        def detokenize(self, ids):
            if len(ids) > 1 and ids[-1] == token:
                raise ValueError("no such text")
            return super().detokenize(ids)

    requests = requests_of(*mixed())
    for request in requests.values():
        request.sampling_params.return_segments = True
    text_controller = TextGenerationController(llm, Broken())
    run_failing(text_controller, requests, [*requests], expected, Exception, "no such text")
    requests = requests_of(*mixed(), kind=DynamicInferenceRequest)
    run_dynamic(text_controller, requests)
    assert [request.failed() for request in requests.values()] == [False, True, False]
    assert llm.stats()["blocks_used"] == 0


def test_interrupted_static_batch_keeps_completed_requests(controller, llm, monkeypatch):
    runner, calls = llm.engine.runner, []
    plain = runner.forward

    def interrupted(batch):
        calls.append(batch)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return plain(batch)

    monkeypatch.setattr(runner, "forward", interrupted)
    requests, streams = requests_of(*mixed()), {n: AsyncStream(n, lambda: None) for n in (10, 11)}
    with pytest.raises(KeyboardInterrupt):
        controller.generate_all_output_tokens_static_batch(requests, streams)
    assert read_texts(streams[11])[-1] == requests[11].generated_text
    # A KeyboardInterrupt would stop the reader's event loop.
    with pytest.raises(RequestFailed, match="KeyboardInterrupt"):
        read(streams[10])
    statuses = [request.status for request in requests.values()]
    assert statuses == [Status.FAILED, Status.COMPLETED, Status.FAILED]
    assert requests[11].error is None and requests[11].generated_length == 7
    assert isinstance(requests[10].error, KeyboardInterrupt) and requests[10].text is None
    assert llm.stats()["blocks_used"] == 0


def test_closing_stream_reader_ends_its_request(controller, llm):
    cancelled, left = [], threading.Event()

    class SlowStream(AsyncStream):
        """Holds up the model until its reader has left, which might otherwise be too late."""

        def put(self, item):
            super().put(item)
            left.wait(60)

    async def main():
        params = SamplingParams(num_tokens_to_generate=200, top_k=1, no_early_termination=True)
        requests = requests_of(params)
        stream = SlowStream(10, cancelled.append, asyncio.get_running_loop())
        run = asyncio.to_thread(
            controller.generate_all_output_tokens_static_batch, requests, {10: stream}
        )
        task = asyncio.create_task(run)
        items = stream.generator()
        await anext(items)
        await items.aclose()
        left.set()
        await task
        return requests[10]

    request = asyncio.run(main())
    assert cancelled == [10] and 0 < request.generated_length < 200
    assert llm.stats()["blocks_used"] == 0


def test_streams_propagate_errors_and_reject_other_event_loops():
    stream = AsyncStream(1, lambda: None)
    stream.put("a")
    stream.finish(RuntimeError)
    stream.put("late")
    with pytest.raises(RuntimeError):
        read(stream)
    stream = AsyncStream(1, lambda: None)
    stream.put("a")
    stream.finish("no exception")

    async def read_stream():
        return [item async for item in stream]

    assert asyncio.run(read_stream()) == ["a"] and stream.request_id == 1
    stream = AsyncStream(1, lambda: None)
    stream.put("a")
    stream.finish()
    assert read(stream) == ["a"] and stream.finished
    other = asyncio.new_event_loop()
    with pytest.raises(InvalidRequest, match="another event loop"):
        read(AsyncStream(1, lambda: None, other))
    other.close()


def test_stream_tokens_puts_results_into_streams(controller, hf):
    ids = hf("the lazy dog", add_special_tokens=False)["input_ids"]
    params = SamplingParams(num_tokens_to_generate=len(ids), return_segments=True)
    requests = [InferenceRequest(request_id=i, prompt_tokens=[5, 6]) for i in range(3)]
    streams = [AsyncStream(i, lambda: None) for i in range(3)]
    tokens = torch.tensor([[5, 6, *ids]] * 3)
    log_probs = torch.arange(tokens.shape[1] - 1).float().repeat(3, 1)
    controller.stream_tokens(
        params, [0, 1, 2], requests, streams, torch.tensor([True, True, False]), [False, True, False],
        tokens, [2, 2, 2], torch.tensor([len(ids), 1, 0]), log_probs,
    )  # fmt: skip
    (first,), (second,) = map(read, streams[:2])
    assert first.generated_text == "the lazy dog" == "".join(first.generated_segments)
    assert first.generated_log_probs == [1.0 + i for i in range(len(ids))]
    assert second.generated_tokens.tolist() == ids[:1]
    assert not streams[2].finished and [s.finished for s in streams[:2]] == [True, True]
    quiet = SamplingParams(no_detokenize_streaming_text=True)
    stream = AsyncStream(0, lambda: None)
    controller.stream_tokens(
        quiet, [0], requests[:1], [stream], [True], [True], tokens[:1], [2], [3], None
    )
    (item,) = read(stream)
    assert item.generated_text == "" and item.generated_log_probs is None


def test_stream_is_read_item_by_item_and_closed():
    async def read():
        cancelled = []
        stream = AsyncStream(7, cancelled.append)
        stream.put("first")
        assert await anext(stream) == "first"
        stream.put("second")
        await stream.aclose()
        await stream.aclose()
        assert [item async for item in stream] == [] and stream.finished
        unread = AsyncStream(8, cancelled.append)
        await unread.aclose()
        ended = AsyncStream(9, cancelled.append)
        ended.finish()
        await ended.aclose()
        return cancelled

    assert asyncio.run(read()) == [7, 8]


def test_termination_id_is_suppressed_before_min_tokens(controller):
    params = SamplingParams(top_k=1, num_tokens_to_generate=9, termination_id=-1)
    (free,) = run_static(controller, params)
    params.termination_id = free.generated_tokens.tolist()[2]
    params.add_attributes({"min_tokens": 6})
    (later,) = run_static(controller, params)
    assert params == dataclasses.replace(params, min_tokens=6)
    assert params.termination_id not in later.generated_tokens.tolist()[:6]
    assert later.generated_length >= 6


# ---- internal methods of the original


def test_dynamic_step_methods_called_one_by_one(controller):
    controller._init_dynamic_sampling_tensors()
    with pytest.raises(InvalidRequest, match="no bucket"):
        controller._sample_from_logits_2d(torch.zeros(1, VOCAB))
    requests = requests_of(
        SamplingParams(top_k=1, num_tokens_to_generate=2, no_early_termination=True),
        SamplingParams(temperature=0.5, return_log_probs=True, num_tokens_to_generate=1),
        SamplingParams(top_k=1, num_tokens_to_generate=1),
    )
    add(controller, requests)
    controller._dynamic_step_sample_bookkeeping()
    assert controller._torch_sampling_buckets == [([0, 2], 1.0, 1, 0.0), ([1], 0.5, 0, 0.0)]
    assert controller._dynamic_step_log_probs_bookkeeping() == (True, False)
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[range(3), [7, 8, 9]] = 0.0
    for given in (logits, logits[None]):
        assert controller._dynamic_step_sample_logits(given).tolist() == [7, 8, 9]
    assert controller._dynamic_step_context_bookkeeping()["active_request_ids"].tolist() == []
    controller.inference_context.step()  # the engine's forward and sampling
    step = controller._dynamic_step_context_bookkeeping()
    assert step["active_request_ids"].tolist() == [10, 11, 12] and len(step["sample"]) == 3
    assert step["finished_request_ids"].tolist() == [11, 12]
    controller.inference_context.reset()
    assert controller._dynamic_step_context_bookkeeping() == {}


def test_num_mtp_heads_comes_from_config(controller, llm):
    assert controller._get_mtp_num_heads() == 0
    llm.engine.config.num_mtp_layers = 2
    try:
        assert controller._get_mtp_num_heads() == 2
    finally:
        del llm.engine.config.num_mtp_layers
    for name in ("_init_mtp_sampling_tensor", "_rewind_kv_cache", "_dummy_serial_mtp_forward"):
        assert getattr(controller, name)() is None

"""The KempnerForge API, and the runner for modules that take `kv_caches`."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import verbatim
from support.kempner_toys import Chain, Toy, as_llama, kempner_toy
from support.odd_toys import DTYPES
from support.requests_mixed import all_facts, facts, keep_prefixes, mixed_requests
from support.toys import random_ids
from verbatim import (
    LLM,
    InvalidRequest,
    NotSupported,
    PromptTooLong,
    SamplingParams,
    UnsupportedModel,
)
from verbatim.api.tensors import engine_of
from verbatim.compat.kempnerforge import KVCache, generate, sample
from verbatim.errors import ModelChanged

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, seed=0)


@pytest.fixture
def toy():
    return kempner_toy()


def prompts_of(rows, length, seed=0):
    return torch.tensor([random_ids(length, seed + row) for row in range(rows)])


def caches_for(module, rows, length):
    c = module.config
    dtype = next(module.parameters()).dtype
    return [
        KVCache(rows, length, c.n_kv_heads, c.head_dim, dtype, "cpu") for _ in range(c.n_layers)
    ]


def by_hand(module, prompt, steps, draw):
    """Generate in a manual loop, in which `draw(logits, position)` picks the ids."""
    caches = caches_for(module, len(prompt), prompt.shape[1] + steps)
    rows = prompt
    with torch.no_grad():
        logits = module(prompt, kv_caches=caches)[:, -1]
        for step in range(steps):
            token = draw(logits, rows.shape[1])
            rows = torch.cat([rows, token[:, None]], dim=1)
            if step < steps - 1:
                logits = module(token[:, None], kv_caches=caches)[:, -1]
    return rows


# ---- KempnerForge's own unit tests of generation, as far as the tests below don't cover them


class TestCache:
    def test_update_appends_new_rows(self):
        cache = KVCache(2, 16, 3, 8, torch.float32, torch.device("cpu"))
        first, second = torch.randn(2, 2, 3, 5, 8), torch.randn(2, 2, 3, 1, 8)
        k, v = cache.update(*first)
        assert torch.equal(k, first[0]) and torch.equal(v, first[1]) and cache.seq_len == 5
        k, v = cache.update(*second)
        both = torch.cat([first, second], dim=3)
        assert torch.equal(k, both[0]) and torch.equal(v, both[1]) and cache.seq_len == 6


class TestSample:
    def test_top_k_keeps_k_likeliest_ids(self):
        logits = torch.full((1, 100), -100.0)
        logits[0, [42, 7, 99]] = torch.tensor([2.0, 1.9, 1.8])
        assert {sample(logits, top_k=1).item() for _ in range(30)} == {42}
        assert {sample(logits, top_k=2).item() for _ in range(100)} == {42, 7}

    def test_higher_temperature_spreads_draws(self):
        logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(400, 4)
        cold, warm = (sample(logits, t, seed=3, position=0) for t in (0.1, 10.0))
        assert (cold == 3).all() and set(warm.tolist()) == {0, 1, 2, 3}

    def test_sample_returns_one_id_per_row(self):
        tokens = sample(torch.randn(8, 64))
        assert tokens.shape == (8,) and tokens.dtype == torch.int64
        assert tokens.min() >= 0 and tokens.max() < 64


class TestGenerate:
    @pytest.mark.parametrize("kv_heads", [1, 3, 6])
    def test_grouped_query_attention_matches_manual_loop(self, kv_heads):
        toy = kempner_toy(n_kv_heads=kv_heads)
        out = generate(toy, prompts_of(1, 5), 8, temperature=0)
        greedy = by_hand(toy, prompts_of(1, 5), 8, lambda x, _: x.argmax(-1))
        assert torch.equal(out, greedy)

    def test_exceeding_max_seq_len_raises_value_error_with_lengths(self, toy):
        with pytest.raises(ValueError, match="exceeds model max_seq_len") as caught:
            generate(toy, prompts_of(1, 50), 20, temperature=0)
        assert isinstance(caught.value, PromptTooLong)
        assert all(number in str(caught.value) for number in ("50", "20", "70", "64"))


# ---- sampling, limits and arguments


@pytest.mark.parametrize("filters", [{}, dict(temperature=0.8, top_k=20, top_p=0.9)])
def test_manual_sample_loop_equals_generate(toy, filters):
    prompt = prompts_of(3, 6)
    prompt[1] = prompt[0]
    out = generate(toy, prompt, 9, **filters, seed=71)
    loop = by_hand(toy, prompt, 9, lambda x, at: sample(x, **filters, seed=71, position=at))
    assert torch.equal(out, loop) and not torch.equal(out[0], out[1])
    greedy = generate(toy, prompt, 9, temperature=0)
    assert torch.equal(greedy, by_hand(toy, prompt, 9, lambda x, _: sample(x, temperature=0)))


def test_top_p_is_applied_after_temperature_and_keeps_at_least_one_id():
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(300, 3)
    for top_p, temperature, kept in [
        (0.45, 1.0, {0}), (0.55, 1.0, {0, 1}), (0.55, 0.25, {0}), (0.0, 1.0, {0}), (1.0, 1.0, {0, 1, 2}),
    ]:  # fmt: skip
        drawn = sample(logits, temperature, top_p=top_p, seed=5, position=0)
        assert set(drawn.tolist()) == kept
    assert set(sample(torch.zeros(50, 7), top_p=0, seed=1, position=0).tolist()) == {0}


def test_rows_stop_at_their_own_eos_and_are_padded_with_it():
    chain = Chain()
    prompt = torch.tensor([[1, 2, 18], [3, 4, 11], [5, 6, 18]])
    out = generate(chain, prompt, 40, temperature=0, eos_token_id=20)
    assert out.shape == (3, 3 + 9)
    assert out[0, 3:].tolist() == [19] + [20] * 8
    assert out[1, 3:].tolist() == [*range(12, 21)]
    for row in range(3):
        alone = generate(chain, prompt[row], 40, temperature=0, eos_token_id=20)[3:]
        assert out[row, 3 : 3 + len(alone)].tolist() == alone.tolist()


def test_reported_kv_bytes_match_cache_sizes(toy):
    c = toy.config
    with LLM(toy, kv_memory="1MB") as llm:
        info = llm.info()
    per_token = c.n_layers * 2 * c.n_kv_heads * c.head_dim * 4
    assert info["kv_bytes_per_token"] == per_token
    assert sum(cache.nbytes for cache in caches_for(toy, 3, 17)) == per_token * 3 * 17
    assert info["kv_bytes"] == per_token * info["num_blocks"] * info["block_size"]
    assert (info["layers"], info["kv_dtype"], info["placement"]) == (2, "float32", "kv_caches")
    assert info["architecture"] == "Toy" and info["max_length_from"] == "max_seq_len"


def test_each_row_runs_one_forward_per_token(toy):
    prompt = prompts_of(3, 6)
    generate(toy, prompt, 1)  # opens the engine
    toy.calls.clear()
    generate(toy, prompt, 7)
    assert toy.calls == [(1, 1)] * 3 * (6 + 6)


def test_generate_accepts_single_prompt_or_batch(toy):
    prompt = prompts_of(1, 6)
    one = generate(toy, prompt[0], 5, seed=2)
    assert one.shape == (11,) and torch.equal(one, generate(toy, prompt, 5, seed=2)[0])
    assert generate(toy, prompt.int(), 2).dtype == torch.int64


def test_sample_uses_torch_rng_unless_greedy(toy):
    prompt, loops = prompts_of(1, 6).expand(4, 6), []
    for _ in range(2):
        torch.manual_seed(41)
        loops.append(by_hand(toy, prompt, 8, lambda x, _: sample(x)))
    assert torch.equal(*loops)
    state = torch.get_rng_state()
    sample(torch.zeros(2, 5), temperature=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_greedy_ignores_top_k_and_top_p():
    logits = torch.tensor([[1.0, 3.0, 2.0], [3.0, 3.0, -math.inf]])
    assert sample(logits, 0, top_k=1, top_p=0.0).tolist() == [1, 0]
    assert sample(logits, 0, top_k=10**6).tolist() == [1, 0]


def test_top_k_above_vocabulary_size_keeps_all_ids(toy):
    prompt = prompts_of(2, 4)
    expected = generate(toy, prompt, 5, seed=1)
    assert torch.equal(generate(toy, prompt, 5, seed=1, top_k=10**30), expected)
    logits = torch.randn(3, 9)
    all_of_them = sample(logits, seed=1, position=4)
    assert torch.equal(sample(logits, top_k=10**30, seed=1, position=4), all_of_them)


def test_numpy_scalars_are_accepted(toy):
    prompt = prompts_of(2, 4)
    plain = dict(temperature=0.5, top_k=9, top_p=0.75, eos_token_id=3)
    expected = generate(toy, prompt, 5, **plain, seed=1)
    tall = dict(temperature=np.float32(0.5), top_k=np.int64(9), top_p=np.float32(0.75))
    out = generate(toy, prompt, np.int64(5), **tall, eos_token_id=np.int32(3), seed=1)
    assert torch.equal(out, expected)
    greedy = generate(toy, prompt, 5, temperature=0)
    assert torch.equal(generate(toy, prompt, 5, temperature=np.float32(0)), greedy)
    assert torch.equal(generate(toy, prompt, 5, top_p=np.float32(0), seed=1), greedy)
    assert torch.equal(generate(toy, prompt, 5, top_k=np.int64(10**15), seed=1, top_p=0), greedy)


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-1.0),
        dict(top_k=-1),
        dict(top_k=True),
        dict(top_p=1.1),
        dict(top_p=False),
        dict(max_new_tokens=-1),
        dict(max_new_tokens=True),
        dict(temperature=torch.tensor([0.0, 1.0])),
        dict(eos_token_id="a"),
        dict(prompt_tokens=torch.tensor([[1, 2]]).to_sparse()),
        dict(prompt_tokens=torch.tensor([[1, 2]], device="meta")),
        dict(eos_token_id=128),
        dict(eos_token_id=-1),
        dict(eos_token_id=True),
        dict(seed=-1),
        dict(prompt_tokens=[[1, 2]]),
        dict(prompt_tokens=torch.tensor([[1.0, 2.0]])),
        dict(prompt_tokens=torch.tensor([[True]])),
        dict(prompt_tokens=torch.zeros(1, 2, 3, dtype=torch.int64)),
        dict(prompt_tokens=torch.zeros(2, 0, dtype=torch.int64)),
        dict(prompt_tokens=torch.tensor([[1, 128]])),
        dict(prompt_tokens=torch.tensor([[1, -2]])),
        dict(model=object()),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_invalid_arguments_are_rejected_before_any_forward(wrong):
    toy = kempner_toy(n_layers=1)
    engine_of(toy)
    toy.calls.clear()
    fine = dict(model=toy, prompt_tokens=torch.tensor([[1, 2]]), max_new_tokens=2)
    with pytest.raises(InvalidRequest, match="eos_token_id" if "eos_token_id" in wrong else r"."):
        generate(**{**fine, **wrong})
    assert toy.calls == []


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-0.5),
        dict(seed=1),
        dict(position=1),
        dict(seed=1, position=[1]),
        dict(temperature=torch.tensor([0.0, 1.0])),
        dict(logits=torch.zeros(2, 3).to_sparse()),
        dict(logits=torch.zeros(2, 3, device="meta")),
        dict(logits=torch.zeros(2, 3, device="meta"), temperature=0),
        dict(logits=torch.randn(4)),
        dict(logits=torch.zeros(2, 3, dtype=torch.int64)),
        dict(logits=[[1.0]]),
        dict(logits=torch.tensor([[math.nan, 1.0], [0.0, 1.0]])),
        dict(logits=torch.full((2, 2), -math.inf)),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_sample_rejects_invalid_arguments(wrong):
    with pytest.raises(InvalidRequest):
        sample(**{"logits": torch.zeros(2, 3), **wrong})


def test_cache_overflow_is_rejected_and_leaves_cache_unchanged():
    cache = KVCache(1, 4, 1, 2, torch.float32, "cpu")
    cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    before = cache.k.clone()
    with pytest.raises(InvalidRequest, match=r"3 positions and 2 new ones make 5.*max_seq_len=4"):
        cache.update(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
    assert cache.seq_len == 3 and torch.equal(cache.k, before)
    for k, v in [((2, 1, 1, 2), (2, 1, 1, 2)), ((1, 1, 1, 2), (1, 1, 0, 2)), ((1, 2), (1, 2))]:
        with pytest.raises(InvalidRequest, match="this cache takes"):
            cache.update(torch.zeros(k), torch.zeros(v))
    with pytest.raises(InvalidRequest, match="head_dim=0"):
        KVCache(1, 4, 1, 0, torch.float32, "cpu")


@pytest.mark.parametrize("which", [0, 1])
def test_invalid_k_or_v_leaves_cache_unchanged(which):
    cache, fine = KVCache(1, 4, 1, 2), torch.ones(1, 1, 2, 2)
    for wrong in (fine.to(torch.complex64), fine.to("meta"), torch.eye(2).to_sparse(), None):
        new = [fine, fine]
        new[which] = wrong
        with pytest.raises(InvalidRequest, match=["k_new is", "v_new is"][which]):
            cache.update(*new)
        assert cache.seq_len == 0 and not cache.k.any() and not cache.v.any()


def test_cache_has_its_dtype_and_a_limited_size_and_outlives_inference_mode():
    ones = torch.ones(2, 1, 1, 2, 2)
    with pytest.raises(InvalidRequest, match=r"float32.*convertible to torch.int8"):
        KVCache(1, 4, 1, 2, torch.int8).update(*ones)
    assert KVCache(1, 4, 1, 2, torch.bfloat16).update(*ones)[0].dtype == torch.bfloat16
    with pytest.raises(InvalidRequest, match=r"K and V of \[1099511627776, 3, 1099511627776, 4\]"):
        KVCache(2**40, 2**40, 3, 4)
    assert KVCache(np.int64(1), 4, 1, 2).nbytes == 64
    with torch.inference_mode():
        cache = KVCache(1, 4, 1, 2)
    assert cache.update(*ones)[0].sum() == 4


# ---- the runner


def test_scores_equal_generated_log_probs_and_llama_with_same_weights(toy):
    with LLM(toy, kv_memory="1MB") as ours, LLM(as_llama(toy), kv_memory="1MB") as llama:
        output = ours.generate([[5, 9, 2]], SamplingParams(max_tokens=20, seed=3))[0].outputs[0]
        scores, same = (llm.score([5, 9, 2, *output.token_ids]) for llm in (ours, llama))
        assert scores[3:] == output.logprobs
        assert scores[1:] == pytest.approx(same[1:], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param({}, "float32", id="llama", marks=pytest.mark.slow),
        pytest.param(dict(num_experts=4, n_layers=1), "bfloat16", id="experts"),
    ],
)
def test_every_schedule_gives_same_bits(options, dtype):
    """Alone, batched, chunked, preempted, from cached prefixes, with other thread counts, `n` and beams."""
    toy = kempner_toy(dtype=DTYPES[dtype], max_seq_len=128, **options)
    all_prompts, all_params = mixed_requests()
    kept = (1, 2, 3, 7, 9, 10)
    prompts = [all_prompts[i] for i in kept]
    params = [all_params[i].replace(hidden_states=False) for i in kept]
    torch.set_num_threads(2)
    with LLM(toy, kv_memory="4MB") as llm:
        assert llm.info()["rows"] == "one at a time"
        before = llm.stats()["forwards"]
        results = llm.generate(prompts, params)
        forwards = llm.stats()["forwards"] - before
        assert forwards == max(len(c.token_ids) for r in results for c in r.outputs)
        expected = all_facts(results)
        order = list(range(len(prompts)))[::-1]
        turned = llm.generate([prompts[i] for i in order], [params[i] for i in order])
        assert all_facts(turned) == [expected[i] for i in order], "reordered"
        for i in range(0, len(prompts), 3):
            assert facts(llm.generate(prompts[i], params[i])[0]) == expected[i], "alone"
        torch.set_num_threads(1)
        assert all_facts(llm.generate(prompts, params)) == expected, "one thread"
        torch.set_num_threads(2)
    with LLM(toy, max_batch_tokens=7, block_size=5, num_threads=3, kv_memory="4MB") as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "chunked"
        llm.sleep()
        llm.wake()
        assert all_facts(llm.generate(prompts[:2], params[:2])) == expected[:2], "slept"
        tiny = 18 * 4 * llm.info()["kv_bytes_per_token"]
    for memory, count in ((tiny, "preemptions"), ("4MB", "cached_tokens")):
        with LLM(toy, kv_memory=memory, block_size=4, max_batch_tokens=11) as llm:
            keep_prefixes(llm)
            for _ in range(2):
                assert all_facts(llm.generate(prompts, params)) == expected, count
            assert llm.stats()[count] > 0


@pytest.mark.parametrize("max_seq_len", [1, 2, 3])
def test_max_seq_len_of_1_to_3_is_enforced(max_seq_len):
    toy = kempner_toy(max_seq_len=max_seq_len)
    room = max_seq_len - 1
    assert generate(toy, prompts_of(2, 1), room, seed=1).shape == (2, max_seq_len)
    with pytest.raises(PromptTooLong, match=f"exceeds model max_seq_len={max_seq_len}"):
        generate(toy, prompts_of(2, 1), room + 1)


def test_max_seq_len_is_read_at_every_call(toy):
    prompt = prompts_of(1, 10)
    generate(toy, prompt, 2)
    toy.config.max_seq_len = 11
    with pytest.raises(PromptTooLong, match=r"12.* exceeds model max_seq_len=11$"):
        generate(toy, prompt, 2)
    toy.config.max_seq_len = 30
    assert generate(toy, prompt, 20).shape == (1, 30)
    with LLM(toy, kv_memory="1MB") as llm:
        toy.config.max_seq_len = 5
        with pytest.raises(ModelChanged, match="max_seq_len changed"):
            llm.generate([[1, 2]], GREEDY)


def test_prompt_too_long_names_max_length_of_engine(toy):
    with LLM(toy, max_length=20, kv_memory="1MB") as llm:
        with pytest.raises(PromptTooLong, match=r"max_seq_len=20 \(here: max_length\)"):
            generate(llm, prompts_of(1, 15), 6)
        assert generate(llm, prompts_of(1, 15), 5).shape == (1, 20)


# ---- unsupported and modified modules


class Changed(Toy):
    """Its forward returns `change(self, logits, tokens)`."""

    def forward(self, tokens, *, kv_caches):
        return self.change(super().forward(tokens, kv_caches=kv_caches), tokens)


class Forgets(Toy):
    def forward(self, tokens, *, kv_caches):
        other = KVCache(len(tokens), 64, 2, 10)
        return super().forward(tokens, kv_caches=[kv_caches[0], other])


class AlwaysCausal(Toy):
    def forward(self, tokens, *, kv_caches):
        plain = F.scaled_dot_product_attention
        with pytest.MonkeyPatch.context() as patch:
            causal = lambda q, k, v, **_: plain(q, k, v, is_causal=True)
            patch.setattr(F, "scaled_dot_product_attention", causal)
            return super().forward(tokens, kv_caches=kv_caches)


def changed(name, change):
    return type(name, (Changed,), {"change": change})


def wider():
    toy = kempner_toy(cls=changed("Wider", lambda self, logits, tokens: logits))
    toy.config.head_dim = 12
    return toy


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (changed("LooksAhead", lambda self, logits, tokens: logits + tokens[:, -1:, None]),
         "LooksAhead: .*a causal model is needed"),
        (changed("Drops", lambda self, logits, tokens: F.dropout(logits, 0.5)),
         "Drops: .*other logits when run again; it may draw random numbers"),
        (changed("Counts", lambda self, logits, tokens: logits + len(self.calls)),
         "Counts: .*gave other logits when run again"),
        (changed("Pairs", lambda self, logits, tokens: (logits, None)),
         r"Pairs: .*returns tuple .* logits \[B, T, V\]"),
        (Forgets, "Forgets: .*did not append the new K and V to the cache of layer 1"),
        (wider, r"Wider: .*puts K \[1, 2, 1, 10\].* whose next rows are \[1, 2, 1, 12\]"),
        (AlwaysCausal, "AlwaysCausal: .*is_causal=True for one query"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_unsupported_module_is_rejected_when_opened(make, why):
    with pytest.raises(UnsupportedModel, match=why):
        generate(wider() if make is wider else kempner_toy(cls=make), prompts_of(1, 4), 2)


def test_module_whose_logits_depend_on_chunk_warns_and_runs_token_by_token():
    def halve(self, logits, tokens):  # half the logits after the third token of a forward
        return torch.cat([logits[:, :3], 0.5 * logits[:, 3:]], dim=1)

    with pytest.warns(RuntimeWarning, match="Capacity: its logits for a whole sequence are off by"):
        llm = LLM(kempner_toy(cls=changed("Capacity", halve)), kv_memory="1MB")
    with llm, LLM(kempner_toy(), kv_memory="1MB") as plain:
        prompt = [random_ids(9, 1)]
        expected = all_facts(plain.generate(prompt, GREEDY))
        assert all_facts(llm.generate(prompt, GREEDY)) == expected


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "bfloat16"])
def test_kv_dtype_other_than_model_dtype_is_rejected(toy, kv_dtype):
    with pytest.raises(NotSupported, match=f"kv_dtype='{kv_dtype}'.*float32"):
        LLM(toy, kv_dtype=kv_dtype)
    LLM(toy, kv_dtype="float32", kv_memory="1MB").close()


@pytest.mark.parametrize("field", ["n_layers", "n_kv_heads", "head_dim", "max_seq_len"])
def test_config_without_required_size_is_rejected(toy, field):
    setattr(toy.config, field, None)
    with pytest.raises(UnsupportedModel, match=f"config.{field}=None must be 1 or more"):
        LLM(toy)


def test_hidden_states_and_routing_are_rejected_for_own_forward(toy):
    with LLM(toy, kv_memory="1MB") as llm:
        toy.calls.clear()
        for options in (dict(hidden_states=True), dict(record_routing=True)):
            with pytest.raises(NotSupported, match="Toy is run through its own forward"):
                llm.generate([[1, 2]], SamplingParams(**options))
        assert toy.calls == []


def test_training_flags_are_restored_after_exception_in_forward(toy):
    generate(toy, prompts_of(1, 4), 1)
    toy.train()
    toy.layers["1"].eval()
    before = [layer.training for layer in toy.modules()]
    assert len(set(before)) == 2

    def fail(*_):
        assert not any(layer.training for layer in toy.modules())
        raise KeyError("broken")

    handle = toy.output_head.proj.register_forward_hook(fail)
    with pytest.raises(KeyError, match="broken"):
        generate(toy, prompts_of(1, 4), 2)
    assert [layer.training for layer in toy.modules()] == before
    handle.remove()
    assert generate(toy, prompts_of(1, 4), 2).shape == (1, 6)


def test_opening_trial_does_not_call_forward_hooks(toy):
    seen = []
    toy.output_head.proj.register_forward_hook(lambda *_: seen.append(1))
    engine_of(toy)
    assert seen == []
    generate(toy, prompts_of(1, 4), 3)
    assert len(seen) == 4 + 2


@pytest.mark.parametrize(
    "mode",
    [
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode(),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.device("meta"),
    ],
    ids=["autocast", "inference mode", "gradients", "device", "meta"],
)
def test_torch_modes_of_caller_do_not_change_results(toy, mode):
    prompt, logits = prompts_of(2, 5), torch.zeros(2, 9)
    expected = generate(kempner_toy(), prompt, 6, seed=1)
    drawn = sample(logits, seed=1, position=3)
    with mode:
        out = generate(toy, prompt, 6, seed=1)
        assert generate(toy, prompt, 3).shape == (2, 8)
        assert torch.equal(sample(logits, seed=1, position=3), drawn)
    assert torch.equal(out, expected) and not out.is_inference() and not out.requires_grad
    with torch.no_grad():  # edits of the weights take effect
        toy.token_embedding["embedding"].weight.mul_(-1)
    assert not torch.equal(generate(toy, prompts_of(2, 5), 6, seed=1), expected)


@pytest.mark.parametrize("how", ["wrapped", "in place", "a layer"])
def test_compiled_module_runs_uncompiled_with_same_tokens(toy, how):
    expected = generate(kempner_toy(), prompts_of(2, 5), 6, seed=1)
    module = toy

    def never(graph, inputs):
        raise AssertionError("compiled")

    if how == "wrapped":
        module = torch.compile(toy, backend=never)
    elif how == "in place":
        toy.compile(backend=never)
    else:
        toy.layers["0"].compile(backend=never)
    assert torch.equal(generate(module, prompts_of(2, 5), 6, seed=1), expected)


def test_edited_module_gets_new_engine_and_open_llm_raises(toy):
    prompt = prompts_of(1, 5)
    generate(toy, prompt, 3)
    toy.bfloat16()  # the dtype changed, so a new engine is opened
    half = kempner_toy(dtype=torch.bfloat16)
    assert torch.equal(generate(toy, prompt, 6, seed=1), generate(half, prompt, 6, seed=1))
    torch.manual_seed(0)
    toy.output_head["proj"] = nn.Linear(60, 300, bias=False).bfloat16()
    toy.token_embedding["embedding"] = nn.Embedding(300, 60).bfloat16()
    expected = by_hand(toy, prompt, 6, lambda x, at: sample(x, seed=1, position=at))
    assert torch.equal(generate(toy, prompt, 6, seed=1), expected)
    llm = LLM(toy, kv_memory="1MB")
    toy.output_head["proj"] = nn.Linear(60, 200, bias=False).bfloat16()
    with pytest.raises(verbatim.VerbatimError, match="vocabulary changed from 300 to 200"):
        llm.generate([[1, 2]], GREEDY)
    llm.close()


def test_cached_engine_does_not_keep_module_alive():
    toy = kempner_toy()
    generate(toy, prompts_of(1, 4), 2)
    gone = weakref.ref(toy)
    del toy
    gc.collect()
    assert gone() is None

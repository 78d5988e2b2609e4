"""Rollouts: shapes, masks, log-probs equal to the trainer's, independent noise for each prompt."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.toys import VOCAB, random_ids
from support.toys import make_toy as make
from verbatim import LLM, FinishReason, InvalidRequest, NotSupported, SamplingParams, rl

PROMPTS = [random_ids(n, seed=n) for n in (4, 9, 2)]
PARAMS = SamplingParams(temperature=0.9, top_k=30, max_tokens=11)


@pytest.fixture(scope="module")
def module():
    return make("llama")


@pytest.fixture(scope="module", params=["left", "right"])
def found(module, request) -> rl.Rollout:
    """Some rows end with an EOS token, some with stop token ids, some by length."""
    params = SamplingParams(
        temperature=1.2,
        max_tokens=9,
        allowed_token_ids=[2, *range(40, 60)],
        stop_token_ids=[*([40 + i, 50 + j] for i in range(5) for j in range(5)), 59],
    )
    return rl.rollout(module, PROMPTS, params, group_size=8, seed=4, padding_side=request.param)


class TestTensors:
    def test_tensor_shapes(self, found: rl.Rollout) -> None:
        width = int(found.response_lengths.max())
        assert found.sequences.shape == found.attention_mask.shape == (3, 8, 9 + width)
        for name in ("action_mask", "logprobs", "sampled_logprobs", "weight_versions"):
            assert getattr(found, name).shape == (3, 8, width)
        assert found.responses.shape == (3, 8, width)
        assert found.prompt_lengths.tolist() == [4, 9, 2]
        assert found.truncated.shape == found.seeds.shape == found.response_lengths.shape == (3, 8)
        assert found.routing is None

    def test_rows_hold_only_prompt_and_completion(self, found: rl.Rollout) -> None:
        for b, result in enumerate(found.results):
            for g, completion in enumerate(result.outputs):
                seen = found.attention_mask[b, g].bool()
                assert found.sequences[b, g][seen].tolist() == PROMPTS[b] + completion.token_ids
                assert (found.sequences[b, g][~seen] == found.pad_token_id).all()
                acted = found.action_mask[b, g]
                assert found.responses[b, g][acted].tolist() == completion.token_ids
                assert found.logprobs[b, g][acted].tolist() == pytest.approx(completion.logprobs)
                for name in ("logprobs", "sampled_logprobs"):
                    assert (getattr(found, name)[b, g][~acted] == 0).all()

    def test_action_mask_ends_with_the_completion(self, found: rl.Rollout) -> None:
        reasons = set()
        for b, result in enumerate(found.results):
            for g, completion in enumerate(result.outputs):
                length = int(found.response_lengths[b, g])
                mask = found.action_mask[b, g].tolist()
                assert mask == [j < length for j in range(len(mask))]
                last, reason = completion.token_ids[-1], completion.stop_reason
                ended = completion.finish_reason is FinishReason.STOP
                assert bool(found.truncated[b, g]) is not ended
                assert found.finish_reasons[b][g] is completion.finish_reason
                if not ended:
                    assert length == 9
                elif isinstance(reason, tuple):
                    assert tuple(completion.token_ids[-len(reason) :]) == reason
                else:
                    assert last == reason
                reasons.add(type(reason) if isinstance(reason, tuple) else reason)
        assert reasons == {2, 59, tuple, None}

    def test_logprobs_with_scores_have_rollout_bits_and_gradient(
        self, found: rl.Rollout, module
    ) -> None:
        gradients = []
        rows = found.sequences, found.attention_mask
        for scores in (None, rl.score(module, *rows)):
            module.zero_grad()
            live = rl.logprobs(module, *rows, scores=scores)
            if scores is not None:
                assert torch.equal(found.of_responses(live), found.logprobs)
            live.square().sum().backward()
            gradients.append(module.lm_head.weight.grad.clone())
        module.zero_grad()
        assert torch.allclose(*gradients, atol=1e-3, rtol=1e-4)
        assert gradients[0].abs().max() > 1

    def test_infinite_scores_keep_their_bits_and_gradient(self) -> None:
        class Table(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.logits = torch.nn.Parameter(torch.tensor([0.0, -math.inf]))

            def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
                return {"logits": self.logits.expand(*input_ids.shape, 2)}

        module, scores = Table(), torch.tensor([[0.0, -math.inf, -0.0]])
        found = rl.logprobs(module, torch.tensor([[0, 1, 0]]), scores=scores)
        assert torch.equal(found.detach().view(torch.int32), scores.view(torch.int32))
        found[0, 1].backward()
        assert module.logits.grad is not None and module.logits.grad.tolist() == [-1.0, 1.0]

    def test_tensors_from_inference_mode_can_be_used_in_a_loss(
        self, found: rl.Rollout, module
    ) -> None:
        with torch.inference_mode():
            inside = rl.rollout(module, PROMPTS, PARAMS, group_size=2)
        for name in inside.__dataclass_fields__:
            value = getattr(inside, name)
            assert not isinstance(value, torch.Tensor) or not value.is_inference(), name
        assert not inside.responses.is_inference()
        module.zero_grad()
        live = rl.logprobs(module, inside.sequences, inside.attention_mask)
        ratio = (inside.of_responses(live) - inside.logprobs).exp()
        (ratio * inside.action_mask).sum().backward()
        assert module.lm_head.weight.grad.abs().sum() > 0
        module.zero_grad()


def test_rollouts_and_scores_ignore_torch_default_device(module) -> None:
    expected = rl.rollout(module, PROMPTS, PARAMS, group_size=2, seed=4)
    with torch.device("meta"):
        again = rl.rollout(module, PROMPTS, PARAMS, group_size=2, seed=4)
        scores = rl.score(module, expected.sequences, expected.attention_mask)
        some = again[1:]
    assert torch.equal(again.sequences, expected.sequences)
    assert torch.equal(again.logprobs, expected.logprobs)
    assert torch.equal(some.sequences, expected.sequences[1:])
    assert torch.equal(expected.of_responses(scores), expected.logprobs)


def test_eos_alone_is_an_action_and_not_padding() -> None:
    module = make("llama")
    with torch.no_grad():
        module.lm_head.weight[2] = module.lm_head.weight.mean(0)
        module.lm_head.weight[2] *= 0
    params = SamplingParams(max_tokens=5, allowed_token_ids=[2])
    found = rl.rollout(module, PROMPTS, params, group_size=2)
    assert found.responses.tolist() == [[[2]] * 2] * 3
    assert found.action_mask.all()
    assert not found.truncated.any()
    assert found.sequences[..., -1].eq(2).all()  # the EOS token is an action, not padding


class TestNoise:
    def test_rollout_is_reproduced_by_its_seed(self) -> None:
        module = make("qwen3")
        a, b, c = (rl.rollout(module, PROMPTS, PARAMS, group_size=4, seed=s) for s in (7, 7, 8))
        assert torch.equal(a.sequences, b.sequences) and torch.equal(a.logprobs, b.logprobs)
        assert not torch.equal(a.seeds, c.seeds)
        assert a.responses.tolist() != c.responses.tolist()

    def test_without_seed_torch_rng_seeds_each_rollout(self, module) -> None:
        torch.manual_seed(5)
        first = [rl.rollout(module, PROMPTS, PARAMS).seeds for _ in range(2)]
        torch.manual_seed(5)
        again = [rl.rollout(module, PROMPTS, PARAMS).seeds for _ in range(2)]
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        assert not torch.equal(first[0], first[1])

    def test_equal_prompts_and_their_samples_differ(self) -> None:
        found = rl.rollout(make("llama"), [PROMPTS[0]] * 6, PARAMS, group_size=6, seed=1)
        assert len({tuple(row) for row in found.responses.flatten(0, 1).tolist()}) > 30

    def test_group_is_reproduced_by_its_seed(self) -> None:
        with LLM(make("llama")) as llm:
            found = rl.rollout(llm, PROMPTS, PARAMS, group_size=3)
            seed = int(found.seeds[1, 0])
            again = SamplingParams(temperature=0.9, top_k=30, max_tokens=11, n=3, seed=seed)
            (result,) = llm.generate(PROMPTS[1], again)
            assert [c.token_ids for c in result.outputs] == [
                c.token_ids for c in found.results[1].outputs
            ]

    def test_mixed_seeds_are_unique_and_well_distributed(self) -> None:
        from verbatim.rl.rollout import _mix_seed

        seeds = {_mix_seed(s, r, b) for s in range(20) for r in range(8) for b in range(20)}
        assert len(seeds) == 20 * 8 * 20
        assert all(0 <= seed < 2**53 for seed in seeds)
        # Each bit of the seed flips about half of the 53 bits.
        flipped = [
            (_mix_seed(9, 0, 0) ^ _mix_seed(9 ^ (1 << k), 0, 0)).bit_count() for k in range(64)
        ]
        assert 22 < sum(flipped) / 64 < 31


class TestExperts:
    def test_routing_is_recorded_and_replayed_by_score(self) -> None:
        module = make("qwen3_moe")
        found = rl.rollout(module, PROMPTS, PARAMS, group_size=3, seed=1, padding_side="left")
        assert found.routing is not None
        assert found.routing.shape == (*found.sequences.shape, 3, 2)
        assert found.routing.dtype == torch.int16
        known = (found.routing >= 0).all(-1).all(-1)
        for b in range(3):
            for g in range(3):
                at = found.attention_mask[b, g].nonzero()[:, 0]
                assert known[b, g].nonzero()[:, 0].tolist() == at[:-1].tolist()
        free = rl.score(module, found.sequences, found.attention_mask)
        replayed = rl.score(module, found.sequences, found.attention_mask, routing=found.routing)
        assert torch.equal(free, replayed)
        other = found.routing.clone()
        other[found.routing >= 0] = (other[found.routing >= 0] + 1) % 6
        forced = rl.score(module, found.sequences, found.attention_mask, routing=other)
        assert not torch.equal(forced, replayed)

    def test_record_routing_can_be_disabled_or_rejected(self) -> None:
        moe = rl.rollout(make("mixtral"), PROMPTS, PARAMS, record_routing=False)
        assert moe.routing is None
        recording = SamplingParams(max_tokens=3, record_routing=True)
        assert rl.rollout(make("mixtral"), PROMPTS, recording, record_routing=False).routing is None
        with pytest.raises(NotSupported, match="record_routing"):
            rl.rollout(make("llama"), PROMPTS, PARAMS, record_routing=True)
        with pytest.raises(NotSupported, match="record_routing"):
            rl.rollout(make("llama"), PROMPTS, recording)
        found = rl.rollout(make("mixtral"), PROMPTS, PARAMS)
        with pytest.raises(InvalidRequest, match="routing has shape"):
            rl.score(make("mixtral"), found.sequences, routing=found.routing[0])


class TestParts:
    def test_indexing_selects_groups_as_a_rollout(self) -> None:
        module = make("qwen3_moe")
        found = rl.rollout(module, PROMPTS, PARAMS, group_size=2, seed=1)
        for groups in (slice(1, 3), [1, 2], torch.tensor([False, True, True])):
            part = found[groups]
            assert torch.equal(part.sequences, found.sequences[1:])
            assert torch.equal(part.routing, found.routing[1:])
            assert part.results == found.results[1:]
            assert part.finish_reasons == found.finish_reasons[1:]
            scores = rl.score(module, part.sequences, part.attention_mask)
            assert torch.equal(part.of_responses(scores), found.logprobs[1:])
        with pytest.raises(InvalidRequest, match="for a single group"):
            found[1]
        with pytest.raises(InvalidRequest, match="values has shape"):
            found.of_responses(found.logprobs)


class TestPrompts:
    def test_padded_tensor_is_accepted_with_its_mask(self, module) -> None:
        ids = torch.full((3, 9), 77)
        mask = torch.zeros(3, 9, dtype=torch.int64)
        for b, prompt in enumerate(PROMPTS):
            ids[b, 9 - len(prompt) :] = torch.tensor(prompt)
            mask[b, 9 - len(prompt) :] = 1
        a = rl.rollout(module, ids, PARAMS, attention_mask=mask, group_size=2, seed=3)
        b = rl.rollout(module, PROMPTS, PARAMS, group_size=2, seed=3)
        assert torch.equal(a.sequences, b.sequences)

    def test_single_prompt_is_a_batch_of_one(self, module) -> None:
        assert rl.rollout(module, PROMPTS[0], PARAMS).sequences.shape[:2] == (1, 1)

    def test_rollout_without_new_tokens(self, module) -> None:
        found = rl.rollout(module, PROMPTS, SamplingParams(max_tokens=0), group_size=2)
        assert found.sequences.shape == (3, 2, 9)
        assert found.action_mask.shape == found.logprobs.shape == (3, 2, 0)
        scores = rl.score(module, found.sequences, found.attention_mask)
        assert found.of_responses(scores).shape == (3, 2, 0)

    def test_pad_token_id_may_be_any_number(self, module) -> None:
        for pad in (-100, 10**9, 2):
            found = rl.rollout(module, PROMPTS, PARAMS, pad_token_id=pad, seed=1)
            live = rl.logprobs(module, found.sequences, found.attention_mask)
            scores = rl.score(module, found.sequences, found.attention_mask)
            assert (live - scores).abs().max() < 1e-5
            assert torch.equal(found.of_responses(scores), found.logprobs)


BAD = {
    "n=3: use group_size": dict(params=SamplingParams(n=3)),
    "seed=3: use the rollout's seed": dict(params=SamplingParams(seed=3)),
    "num_beams=2: beams are not sampled": dict(params=SamplingParams(num_beams=2)),
    "group_size=0": dict(group_size=0),
    "group_size=True": dict(group_size=True),
    "padding_side='middle'": dict(padding_side="middle"),
    "pad_token_id='x'": dict(pad_token_id="x"),
    "seed=-1": dict(seed=-1),
    "seed=1.5": dict(seed=1.5),
    "params=5": dict(params=5),
    "record_routing='no'": dict(record_routing="no"),
    f"pad_token_id={2**63}": dict(pad_token_id=2**63),
    "attention_mask requires": dict(attention_mask=torch.ones(3, 9)),
    "no prompts": dict(prompts=[]),
    "id 128 is outside": dict(prompts=[[VOCAB]]),
    "has no tokens": dict(prompts=torch.ones(1, 3).long(), attention_mask=torch.zeros(1, 3)),
    "torch.distributed is not initialised": dict(process_group=object()),
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_arguments_are_rejected_before_any_forward(message: str) -> None:
    module, forwards = make("llama"), []
    module.register_forward_hook(lambda *_: forwards.append(1))
    given = {"prompts": PROMPTS, "params": PARAMS, **BAD[message]}
    with pytest.raises(InvalidRequest, match=message):
        rl.rollout(module, given.pop("prompts"), given.pop("params"), **given)
    assert not forwards


class TestScoring:
    def test_rows_of_only_padding_score_zero(self, module) -> None:
        ids = torch.randint(3, VOCAB, (2, 3, 6))
        mask = torch.ones_like(ids)
        mask[0, 1], mask[1, 2, 2:] = 0, 0
        scores, live = rl.score(module, ids, mask), rl.logprobs(module, ids, mask)
        assert (scores[0, 1] == 0).all() and (live[0, 1] == 0).all()
        assert (scores - live).abs().max() < 1e-5
        nothing = torch.zeros_like(mask)
        assert (rl.score(module, ids, nothing) == 0).all()
        assert (rl.logprobs(module, ids, nothing) == 0).all()

    @pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "opt", "qwen3_moe", "mistral"])
    def test_left_padded_scores_match_rollout_on_any_architecture(self, name: str) -> None:
        module = make(name)
        found = rl.rollout(module, PROMPTS, PARAMS, group_size=2, seed=2)
        scores = rl.score(module, found.sequences, found.attention_mask)
        assert torch.equal(found.of_responses(scores), found.logprobs)
        assert (scores[found.attention_mask == 0] == 0).all()
        live = rl.logprobs(module, found.sequences, found.attention_mask, micro_batch_size=5)
        assert (live - scores).abs().max() < 1e-5

    @pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 3, 0), (0, 2, 5), (3, 1), (1, 1)])
    def test_rows_without_scored_tokens_have_a_zero_gradient(self, shape) -> None:
        module = make("llama")
        ids = torch.full(shape, 5)
        assert rl.score(module, ids, torch.ones_like(ids)).tolist() == torch.zeros(shape).tolist()
        live = rl.logprobs(module, ids)
        assert live.shape == shape
        live.sum().backward()
        assert module.lm_head.weight.grad is not None
        assert (module.lm_head.weight.grad == 0).all()

    @pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
    def test_scores_of_low_precision_kv_engine_make_ratio_one(self, kv_dtype: str) -> None:
        module = make("llama")
        with LLM(module, kv_dtype=kv_dtype) as llm:
            found = rl.rollout(llm, PROMPTS, PARAMS, group_size=2)
            rows = found.sequences, found.attention_mask
            live = rl.logprobs(module, *rows, scores=rl.score(llm, *rows))
            assert torch.equal(found.of_responses(live), found.logprobs)
            own = found.of_responses(rl.logprobs(module, *rows))
            assert not torch.equal(own, found.logprobs)

    def test_module_with_kv_caches_is_scored_and_trained(self) -> None:
        from support.kempner_toys import kempner_toy

        module = kempner_toy(vocab_size=VOCAB)
        found = rl.rollout(module, PROMPTS, PARAMS, group_size=2)
        rows = found.sequences, found.attention_mask
        assert torch.equal(found.of_responses(rl.score(module, *rows)), found.logprobs)
        live = rl.logprobs(module, *rows)
        assert (found.of_responses(live) - found.logprobs).abs().max() < 1e-5
        live.sum().backward()

    def test_temperature_divides_the_logits(self, module) -> None:
        ids = torch.tensor([PROMPTS[1]])
        with torch.no_grad():
            logits = module(ids).logits[0, :-1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        got = rl.logprobs(module, ids, temperature=0.7)[0]
        assert got[0] == 0
        assert torch.allclose(got[1:], expected, atol=1e-6)

    @pytest.mark.parametrize(
        "arguments",
        [
            dict(sequences=torch.ones(2, 3)),
            dict(sequences=[[1, 2]]),
            dict(sequences=torch.ones(2, 3).long(), attention_mask=torch.ones(2, 2)),
            dict(sequences=torch.ones(1, 3).long(), attention_mask=torch.tensor([[1, 0, 1]])),
            dict(sequences=torch.ones(1, 3).long(), attention_mask=torch.tensor([[1, 2, 1]])),
        ],
    )
    def test_invalid_scoring_arguments_are_rejected(self, arguments, module) -> None:
        for function in (rl.score, rl.logprobs):
            with pytest.raises(InvalidRequest):
                function(module, **arguments)
        ids = torch.ones(1, 3).long()
        for wrong in (
            dict(temperature=0),
            dict(temperature="x"),
            dict(micro_batch_size=0),
            dict(temperature=2, scores=torch.zeros(1, 3)),
            dict(scores=torch.zeros(3)),
            dict(attention_mask=[[1, 1, 1]]),
            dict(sequences=[[1, 2, 3]], scores=torch.zeros(1, 3)),
            dict(sequences=torch.full((1, 3), VOCAB)),
            dict(sequences=torch.full((1, 3), -1)),
        ):
            with pytest.raises(InvalidRequest):
                rl.logprobs(module, **{"sequences": ids, **wrong})
        with pytest.raises(InvalidRequest):
            rl.logprobs(5, ids)
        with pytest.raises(InvalidRequest):
            rl.score(module, torch.full((1, 3), VOCAB))


def test_example_of_rl_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
    first, update = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[:2]
    module = make("llama")
    scope = {"module": module, "tokenizer": None, "prompts": PROMPTS}
    exec(first.replace("max_tokens=256", "max_tokens=9"), scope)
    assert (scope["ratio"] == 1).all()
    scope |= {"named_tensors": iter(module.state_dict().items()), "step": 70}
    exec(update, scope)
    assert scope["llm"].stats()["weight_version"] == 70
    scope["llm"].close()


class TestSupport:
    """With the support of each draw, ratios are exact under truncated sampling."""

    PARAMS = SamplingParams(temperature=0.8, top_k=20, top_p=0.7, max_tokens=9, support=True)

    def test_probabilities_within_support_match_sampled_logprobs(self, module) -> None:
        r = rl.rollout(module, PROMPTS, self.PARAMS, group_size=3, seed=4)
        assert r.log_masses is not None and (r.log_masses[r.action_mask] < 0).all()
        at_temperature = rl.logprobs(module, r.sequences, r.attention_mask, temperature=0.8)
        drawn = r.of_responses(at_temperature) - r.log_masses
        assert torch.allclose(drawn[r.action_mask], r.sampled_logprobs[r.action_mask], atol=1e-4)
        for result in r.results:
            for output in result.outputs:
                ids = torch.tensor([result.prompt_token_ids + output.token_ids])
                with torch.no_grad():
                    logits = module(input_ids=ids).logits[0, -len(output.token_ids) - 1 :] / 0.8
                assert output.supports is not None
                for row, support, token_id, logprob in zip(
                    logits, output.supports, output.token_ids, output.sampled_logprobs, strict=False
                ):
                    assert support is not None and len(support) <= 20
                    kept = row[support].log_softmax(0)
                    assert kept[support.index(token_id)].item() == pytest.approx(logprob, abs=1e-4)

    def test_support_changes_no_token_and_no_logprob(self, module) -> None:
        params = self.PARAMS, self.PARAMS.replace(support=False)
        r, plain = (rl.rollout(module, PROMPTS, p, group_size=3, seed=4) for p in params)
        assert plain.log_masses is None and plain.results[0].outputs[0].supports is None
        assert torch.equal(r.sequences, plain.sequences)
        assert torch.equal(r.sampled_logprobs, plain.sampled_logprobs)

    def test_support_is_the_same_in_any_schedule(self, module) -> None:
        """Alone, in chunks, streamed, and in a batch."""
        params = self.PARAMS.replace(n=2, seed=5)
        with LLM(module) as llm:
            whole = llm.generate(PROMPTS, params)
            pieces = list(llm.stream(PROMPTS[1], params))
        with LLM(module, max_batch_tokens=4, block_size=4) as small:
            (alone,) = small.generate([PROMPTS[1]], params)
        for a, b in zip(whole[1].outputs, alone.outputs, strict=True):
            own = [piece for piece in pieces if piece.index == a.index]
            assert a.supports == b.supports == [s for p in own for s in p.supports or ()]
            assert a.log_masses == b.log_masses == [m for p in own for m in p.log_masses or ()]

    def test_support_is_none_without_a_filter(self, module) -> None:
        params = SamplingParams(max_tokens=3, support=True)
        with LLM(module) as llm:
            all_params = [params, params.replace(temperature=0)]
            output, certain = (r.outputs[0] for r in llm.generate([PROMPTS[0]] * 2, all_params))
        assert output.supports == [None] * 3 and output.log_masses == [0.0] * 3
        assert certain.supports == [[i] for i in certain.token_ids]
        with pytest.raises(NotSupported, match="beams"):
            SamplingParams(support=True, num_beams=2)

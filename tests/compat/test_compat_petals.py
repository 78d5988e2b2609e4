"""The Petals API: its documented calls, which equal transformers' `generate` on the concatenated ids."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation import MaxLengthCriteria, SynthIDTextWatermarkingConfig

import verbatim
import verbatim.compat.petals.model as petals_model
from support.programs import in_thread
from support.stages import ThreadHosts, serving
from support.toy_tokenizers import byte_level
from support.toys import make_toy, random_ids
from verbatim import (
    LLM,
    Cluster,
    EngineClosed,
    InvalidRequest,
    NotSupported,
    OutOfBlocks,
    PromptTooLong,
    RequestFailed,
    SamplingParams,
    SessionBusy,
)
from verbatim.compat.petals import (
    AutoDistributedModelForCausalLM,
    DistributedBloomForCausalLM,
    DistributedLlamaForCausalLM,
    DistributedModelForCausalLM,
    RemoteGenerationMixin,
    RemotePastKeyValues,
)

STORYTELLER = str(Path(verbatim.__file__).parent / "storyteller")
EOS = 2
ROWS = torch.tensor([random_ids(7, 1), random_ids(7, 2)])
FREE = dict(eos_token_id=None)  # nothing ends a row

# The documented examples, in which the test replaces the import and the model's name.
SEED = """
from petals import AutoDistributedModelForCausalLM
from transformers import AutoTokenizer
model_name = "petals-team/StableBeluga2"
model = AutoDistributedModelForCausalLM.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)
inputs = tokenizer("The meaning of life is", return_tensors="pt")["input_ids"]
# Simple generation (session created automatically)
outputs = model.generate(inputs, max_new_tokens=50, do_sample=True, temperature=0.7)
print(tokenizer.decode(outputs[0], skip_special_tokens=True))
"""
SEED_SESSION = """
# Reuse session for multi-turn generation
with model.inference_session(max_length=512) as session:
    # First turn
    inputs1 = tokenizer("User: Hello!\\nAssistant:", return_tensors="pt")["input_ids"]
    out1 = model.generate(inputs1, session=session, max_new_tokens=50)
    response1 = tokenizer.decode(out1[0])
    # Second turn (session preserves KV cache)
    inputs2 = tokenizer(response1 + "\\nUser: Tell me more.\\nAssistant:", return_tensors="pt")["input_ids"]
    out2 = model.generate(inputs2, session=session, max_new_tokens=50)
"""


@pytest.fixture(scope="module")
def toy() -> Any:
    return make_toy("llama", max_position_embeddings=128)


@pytest.fixture(scope="module")
def model(toy: Any) -> Iterator[DistributedModelForCausalLM]:
    with LLM(toy, kv_memory="4MB") as llm:
        yield opened(llm)


def opened(model: Any, **options: Any) -> Any:
    return AutoDistributedModelForCausalLM.from_pretrained(model, **options)


def alike(mine: torch.Tensor, theirs: torch.Tensor, eos: int = EOS) -> bool:
    """Whether the ids are equal through the first EOS; after it transformers' beams have EOS, these pads."""
    new = (mine == eos).cumsum(1) - (mine == eos).long() > 0
    return mine.shape == theirs.shape and bool((mine == theirs)[~new].all())


def theirs(toy: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    return toy.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)


# ---- documented calls


def test_documented_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    text = SEED.replace("from petals", "from verbatim.compat.petals")
    torch.manual_seed(41)
    exec(text.replace("petals-team/StableBeluga2", STORYTELLER), scope)
    model, tokenizer, outputs = scope["model"], scope["tokenizer"], scope["outputs"]
    with model:
        assert outputs.dtype == torch.int64 and outputs.shape[1] <= scope["inputs"].shape[1] + 50
        assert capsys.readouterr().out.startswith("The meaning of life is")
        torch.manual_seed(41)
        again = model.generate(scope["inputs"], max_new_tokens=50, do_sample=True, temperature=0.7)
        assert torch.equal(again, outputs)
        exec(SEED_SESSION, scope)
        one, two, session = scope["out1"], scope["out2"], scope["session"]
        assert scope["response1"].startswith("User: Hello!\nAssistant:")
        assert torch.equal(session.output_ids, torch.cat([one, two], dim=1))
        assert tokenizer.decode(two[0]).startswith(scope["response1"] + "\nUser: Tell me more.")
        joined = torch.cat([one, scope["inputs2"]], dim=1)
        whole = model.generate(joined, max_new_tokens=50, seed=session.seed)
        assert torch.equal(whole[:, one.shape[1] :], two)
        assert session.closed and model.active_session is None
        assert model.llm.stats()["sessions"] == model.llm.stats()["blocks_used"] == 0


@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=True, seed=3),
        dict(num_beams=2),
        dict(no_repeat_ngram_size=2, output_scores=True, return_dict_in_generate=True),
        dict(stopping_criteria=[lambda ids, scores: ids.shape[1] > 9]),
    ],
    ids=["sample", "beams", "scores", "criteria"],
)
def test_generate_ignores_torch_default_device(model: Any, options: Any) -> None:
    expected = model.generate(ROWS, max_new_tokens=5, **options)
    with torch.device("meta"):
        found = model.generate(ROWS, max_new_tokens=5, **options)
    if "return_dict_in_generate" in options:
        assert all(map(torch.equal, found.scores, expected.scores))
        found, expected = found.sequences, expected.sequences
    assert torch.equal(found, expected)


PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "best_beams": dict(num_beams=4, num_return_sequences=3, early_stopping=True),
    "length_penalty": dict(num_beams=3, length_penalty=-1.5),
    "beams_penalty": dict(num_beams=2, repetition_penalty=1.5, suppress_tokens=[4, 5, 6]),
    "beams_renormalized": dict(num_beams=3, renormalize_logits=True, no_repeat_ngram_size=2),
    "repetition_penalty": dict(repetition_penalty=1.4),
    "ngrams": dict(no_repeat_ngram_size=2),
    "bad_words": dict(bad_words_ids=[[47], [23, 36], [EOS]], suppress_tokens=[9, 50]),
    "min_new_tokens": dict(min_new_tokens=8, eos_token_id=[2, 47, 125]),
    "min_above_max": dict(min_new_tokens=30, eos_token_id=[2, 47, 125]),
    "min_length": dict(min_length=15, eos_token_id=[2, 47, 125], no_repeat_ngram_size=3),
    "forced_eos": dict(forced_eos_token_id=EOS),
    "decay": dict(exponential_decay_length_penalty=(2, 1.6)),
    "begin": dict(begin_suppress_tokens=list(range(64))),
    "bias": dict(sequence_bias=[[[5], 3.0], [[47, 23], -9.0]]),
    "encoder": dict(encoder_repetition_penalty=1.5, encoder_no_repeat_ngram_size=2),
    "watermark": dict(watermarking_config=WatermarkingConfig(bias=3.0)),
    "prefix": dict(prefix_allowed_tokens_fn=lambda row, ids: range(row * 40 + 3, row * 40 + 60)),
    "config": dict(generation_config=GenerationConfig(num_beams=2, eos_token_id=EOS)),
}


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("name", PARAMETERS)
def test_generation_parameters_match_transformers(name: str, model: Any, toy: Any) -> None:
    kwargs = PARAMETERS[name]
    eos = 47 if name.startswith("min_") else EOS
    mine = model.generate(ROWS, max_length=23, **kwargs)
    assert alike(mine, theirs(toy, ROWS, max_length=23, **kwargs), eos)
    plain = model.generate(ROWS, max_new_tokens=16)
    assert torch.equal(mine, plain) == (name == "greedy")
    assert mine.shape[1] <= 23 and not mine.is_inference()


def test_length_of_call_overrides_generation_config(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=9, eos_token_id=EOS)
    assert model.generate(ROWS, generation_config=config, **FREE).shape == (2, 16)
    assert model.generate(ROWS, config, max_length=None, **FREE).shape == (2, 16)
    assert model.generate(ROWS, config, max_length=12, **FREE).shape == (2, 12)
    assert config.max_new_tokens == 9
    config.max_length = 12
    with pytest.raises(InvalidRequest, match="give one of them"):
        model.generate(ROWS, config)


def test_sampling_is_reproducible_by_seed_and_row(model: Any) -> None:
    same = ROWS[:1].repeat(4, 1)
    draw = dict(max_new_tokens=12, do_sample=True, **FREE)
    torch.manual_seed(41)
    first = model.generate(same, **draw)
    torch.manual_seed(41)
    assert torch.equal(model.generate(ROWS[:1], num_return_sequences=4, **draw), first)
    assert len(set(map(tuple, first.tolist()))) == 4
    assert not torch.equal(model.generate(same, **draw), first)
    for kwargs in (dict(temperature=0.7, top_k=9), dict(top_k=0, top_p=0.8), dict(min_p=0.1)):
        native = model.generate(ROWS, seed=3, **draw, **kwargs)
        kept = dict(return_dict_in_generate=True, output_scores=True)
        chained = model.generate(ROWS, seed=3, **draw, **kwargs, **kept)
        assert torch.equal(native, chained.sequences)  # transformers' filters leave the same ids
    params = SamplingParams(max_tokens=12, ignore_eos=True, top_k=50, seed=3)
    wanted = model.llm.generate([ROWS[0].tolist()], params)[0].outputs[0].token_ids
    assert model.generate(ROWS, seed=3, **draw)[0, 7:].tolist() == wanted


def test_default_sampling_draws_from_top_50(model: Any, toy: Any) -> None:
    outputs = model.generate(
        ROWS[:1], max_new_tokens=1, do_sample=True, temperature=20.0, num_return_sequences=2000
    )
    drawn = set(outputs[:, -1].tolist())
    assert outputs.shape == (2000, 8) and 40 < len(drawn) <= 50
    assert drawn <= set(toy(ROWS[:1]).logits[0, -1].topk(50).indices.tolist())


def test_output_scores_match_transformers(model: Any, toy: Any) -> None:
    options = dict(max_new_tokens=9, return_dict_in_generate=True, no_repeat_ngram_size=2)
    options |= dict(output_scores=True, output_logits=True, eos_token_id=[EOS, 50])
    mine, other = model.generate(ROWS, **options), theirs(toy, ROWS, **options)
    assert torch.equal(mine.sequences, other.sequences)
    new_ids = mine.sequences[:, 7:]
    going = torch.ones(2, dtype=torch.bool)
    for step, name in ((s, n) for s in range(new_ids.shape[1]) for n in ("scores", "logits")):
        here, there = getattr(mine, name)[step], getattr(other, name)[step]
        assert here.shape == (2, 128) and here.dtype == torch.float32
        assert torch.allclose(here[going], there[going], atol=1e-4)
        assert here.argmax(1).tolist() == new_ids[:, step].tolist() or name == "logits"
        if name == "logits":
            going &= ~torch.isin(new_ids[:, step], torch.tensor([EOS, 50]))
    assert len(mine.scores) == len(mine.logits) == new_ids.shape[1]
    assert isinstance(mine.past_key_values, RemotePastKeyValues)
    assert mine.past_key_values.get_seq_length() == mine.sequences.shape[1]
    beams = model.generate(ROWS, max_new_tokens=6, num_beams=3, return_dict_in_generate=True)
    options = dict(max_new_tokens=6, num_beams=3, return_dict_in_generate=True, output_scores=True)
    assert torch.allclose(beams.sequences_scores, theirs(toy, ROWS, **options).sequences_scores)


# ---- over stages


def test_bloom_over_two_stages_equals_transformers(tmp_path: Path) -> None:
    hf = make_toy("bloom")
    hf.save_pretrained(tmp_path)

    def lift(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (torch.arange(scores.shape[-1]) % ids.shape[-1] == 0)

    where = Cluster(stages=2, hosts=ThreadHosts())
    options = dict(placement=where, kv_memory="4MB", dtype=torch.float32)
    with DistributedBloomForCausalLM.from_pretrained(tmp_path, **options) as model:
        assert len(model.llm.engine.runner.group.members) == 2
        for kwargs in (
            {},
            dict(num_beams=5),
            dict(no_repeat_ngram_size=2),
            dict(logits_processor=LogitsProcessorList([lift])),
            dict(num_beams=5, logits_processor=[lift, NoRepeatNGramLogitsProcessor(2)]),
        ):
            options = dict(max_new_tokens=10, return_dict_in_generate=True, **kwargs)
            outputs = model.generate(ROWS, **options).sequences
            assert alike(outputs, theirs(hf, ROWS, **options).sequences)
        with model.inference_session(max_length=64, seed=5):
            one = model.generate(ROWS, max_new_tokens=3, do_sample=True, **FREE)
            serving(model.llm)[1].kill()
            two = model.generate(None, max_new_tokens=4, do_sample=True, **FREE)
        whole = model.generate(ROWS, max_new_tokens=7, do_sample=True, seed=5, **FREE)
        assert torch.equal(torch.cat([one, two], dim=1), whole)


# ---- sessions


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ends", [False, True], ids=["free", "ends"])
def test_continued_session_calls_equal_one_call(model: Any, do_sample: bool, ends: bool) -> None:
    options = dict(do_sample=do_sample, repetition_penalty=1.2, no_repeat_ngram_size=3)
    free = model.generate(ROWS, max_new_tokens=8, seed=5, **FREE, **options)
    eos = int(free[0, 7 + 3]) if ends else None
    whole = model.generate(ROWS, max_new_tokens=8, seed=5, eos_token_id=eos, **options)
    assert ends == bool((whole[0, 11:] == 0).all())
    with model.inference_session(max_length=16, seed=5) as session:
        parts = [
            model.generate(ids, max_new_tokens=new, eos_token_id=eos, **options)
            for ids, new in ((ROWS, 1), (None, 6), (None, 1))
        ]
        assert [part.shape[1] for part in parts] == [8, 6, 1]
        assert torch.equal(torch.cat(parts, dim=1), whole)
        assert torch.equal(session.output_ids, whole) and session.position == 15
        session.position = 9
        assert torch.equal(session.output_ids, whole[:, :9])
        again = model.generate(None, max_length=15, eos_token_id=eos, **options)
        assert torch.equal(again, whole[:, 9:])


def test_session_computes_only_new_tokens(model: Any) -> None:
    runner, rows = model.llm.engine.runner, list[int]()
    forward = runner.forward
    runner.forward = lambda batch: (rows.append(len(batch.token_ids)), forward(batch))[1]
    try:
        with model.inference_session(max_length=100):
            model.generate(torch.cat([ROWS] * 4, dim=1), max_new_tokens=1, **FREE)
            rows.clear()
            model.generate(None, max_new_tokens=2, **FREE)
            model.generate(ROWS, max_new_tokens=1, **FREE)
    finally:
        runner.forward = forward
    assert rows == [2, 2, 16]


def test_repetition_penalty_counts_earlier_session_turns(model: Any, toy: Any) -> None:
    options = dict(max_new_tokens=8, repetition_penalty=1.6, **FREE)
    with model.inference_session(max_length=64) as session:
        one = model.generate(ROWS, **options)
        two = model.generate(ROWS.flip(0), **options)
    joined = torch.cat([one, ROWS.flip(0)], dim=1)
    assert torch.equal(two, theirs(toy, joined, **options)[:, one.shape[1] :])
    assert not torch.equal(two, model.generate(ROWS.flip(0), **options))
    assert session.output_ids.shape == (2, 30)


def test_ragged_and_finished_rows_continue_as_they_would_alone(model: Any) -> None:
    free = model.generate(ROWS, max_new_tokens=6, **FREE)
    eos = int(free[0, 7 + 1])
    short = torch.tensor([[0, 0, 17], [9, 8, 7]])
    with model.inference_session(max_length=64) as session:
        one = model.generate(ROWS, max_new_tokens=6, eos_token_id=eos)
        assert one[0, 9:].tolist() == [0] * 4
        two = model.generate(short, max_new_tokens=5, **FREE)
        assert session.position == 13 + 8
        session.position = 13
        assert torch.equal(model.generate(short, max_new_tokens=5, **FREE), two)
    alone = torch.tensor([[*one[0, :9].tolist(), 17]])
    assert torch.equal(model.generate(alone, max_new_tokens=5, **FREE)[:, 10:], two[:1, 3:])
    with model.inference_session(max_length=64):  # if all rows have finished, they continue
        ended = model.generate(ROWS[:1], max_new_tokens=6, eos_token_id=eos)
        more = model.generate(None, max_new_tokens=3, **FREE)
    assert ended.shape == (1, 9) and torch.equal(more, free[:1, 9:12])


def test_session_continues_from_best_beam(model: Any, toy: Any) -> None:
    options = dict(max_new_tokens=6, num_beams=3, **FREE)
    with model.inference_session(max_length=64) as session:
        one = model.generate(ROWS, **options)
        two = model.generate(None, **options)
        three = model.generate(ROWS, max_new_tokens=4, **FREE)
        assert torch.equal(session.output_ids, torch.cat([one, two, three], dim=1))
    assert torch.equal(one, theirs(toy, ROWS, **options))
    assert torch.equal(two, theirs(toy, one, **options)[:, 13:])
    joined = torch.cat([one, two, ROWS], dim=1)
    assert torch.equal(three, theirs(toy, joined, max_new_tokens=4, **FREE)[:, 19:])


def test_session_overflow_raises_value_error_and_session_stays_usable(model: Any) -> None:
    with model.inference_session(max_length=20) as session:
        one = model.generate(ROWS, max_new_tokens=5, **FREE)
        for kwargs in (dict(max_new_tokens=9), dict(max_length=21), dict(max_length=12)):
            with pytest.raises(ValueError, match=r"max_length"):
                model.generate(None, **kwargs)
        with pytest.raises(PromptTooLong, match="12 tokens of the session, 7 given and 2 new"):
            model.generate(ROWS, max_new_tokens=2)
        assert session.position == 12 and session.max_length == 20
        rest = model.generate(None, max_length=20, **FREE)
        with model.use_session(None):
            whole = model.generate(ROWS, max_new_tokens=13, **FREE)
        assert torch.equal(torch.cat([one, rest], dim=1), whole)
        with pytest.raises(InvalidRequest, match="position=21"):
            session.position = 21
        session.position = 0
        assert session.output_ids is None  # the next call may have any number of rows
        again = model.generate(ROWS[:1], max_new_tokens=5, session=session, **FREE)
        assert torch.equal(again, one[:1]) and session.last_token_id.tolist() == [[one[0, -1]]]


def test_generate_without_inputs_starts_with_bos(model: Any) -> None:
    from_bos = model.generate(torch.tensor([[1]]), max_new_tokens=5, **FREE)
    assert torch.equal(model.generate(max_new_tokens=5, **FREE), from_bos)
    with model.inference_session(max_length=16):
        one = model.generate(None, max_new_tokens=2, **FREE)
        two = model.generate(None, max_new_tokens=3, **FREE)
    assert torch.equal(torch.cat([one, two], dim=1), from_bos) and one.shape == (1, 3)
    with pytest.raises(InvalidRequest, match="BOS"):
        model.generate(bos_token_id=999, max_new_tokens=1)


def test_call_uses_given_or_innermost_active_session(model: Any, toy: Any) -> None:
    with model.inference_session(max_length=64) as outer:
        model.generate(ROWS, max_new_tokens=2, **FREE)
        with model.inference_session(max_length=64) as inner:
            assert model.active_session is inner
            model.generate(ROWS[:1], max_new_tokens=3, **FREE)
            model.generate(None, max_new_tokens=1, session=outer, **FREE)
            with model.use_session(None):
                assert model.active_session is None
                alone = model.generate(ROWS, max_new_tokens=3, **FREE)
            assert in_thread(lambda: model.active_session).result() is None
        assert model.active_session is outer and inner.closed
        assert torch.equal(outer.output_ids, alone) and inner.position == 10
        with opened(toy) as other:
            assert other.active_session is None
            with pytest.raises(InvalidRequest, match="belongs to another model"):
                other.generate(ROWS, session=outer, max_new_tokens=1)
            other.llm.close()
    with pytest.raises(EngineClosed, match="session"):
        model.generate(ROWS, session=outer, max_new_tokens=1)


def test_failed_call_leaves_session_unchanged(model: Any) -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 16:
            raise ZeroDivisionError
        return scores

    with model.inference_session(max_length=40) as session:
        with pytest.raises(RequestFailed, match="fails"):
            model.generate(ROWS, max_new_tokens=20, logits_processor=[fails], **FREE)
        assert session.output_ids is None and session.seed is None
        one = model.generate(ROWS[:1], max_new_tokens=5, **FREE)
        with pytest.raises(RequestFailed, match="fails"):
            model.generate(None, max_new_tokens=20, logits_processor=[fails], **FREE)
        with pytest.raises(InvalidRequest, match="2 rows, but the session has 1"):
            model.generate(ROWS, max_new_tokens=1)

        def calls(ids: torch.Tensor, scores: Any) -> bool:
            with pytest.raises(SessionBusy):
                session.position = 3
            return False

        more = model.generate(None, max_new_tokens=4, stopping_criteria=[calls], **FREE)
        assert more.shape == (1, 4)
        session.position = 7
        again = model.generate(None, max_new_tokens=9, **FREE)
        assert torch.equal(again, torch.cat([one[:, 7:], more], dim=1))


def test_sessions_reserve_blocks_and_free_them(toy: Any) -> None:
    with LLM(toy, kv_memory="100KB", block_size=16) as llm:
        model = opened(llm)
        blocks = llm.stats()["blocks_free"]
        rows = ROWS[:1].repeat(blocks // 2 + 1, 1)
        with model.inference_session(max_length=32) as session:
            with pytest.raises(OutOfBlocks, match="reserved"):
                model.generate(rows, max_new_tokens=2)
            assert llm.stats()["sessions"] == llm.stats()["blocks_reserved"] == 0
            model.generate(rows[:-1], max_new_tokens=2)
            assert llm.stats()["sessions"] == blocks // 2
        assert llm.stats()["sessions"] == llm.stats()["blocks_used"] == 0
        session = model.inference_session(max_length=32)
        model.generate(ROWS, session=session, max_new_tokens=2)
        assert llm.stats()["sessions"] == 2
        del session
        gc.collect()
        assert llm.stats()["sessions"] == llm.stats()["blocks_used"] == 0


# ---- stopping criteria and streamers


def test_stopping_criteria_end_rows_independently(model: Any, toy: Any) -> None:
    free = model.generate(ROWS, max_new_tokens=12, **FREE)
    last = int(free[1, 7 + 4])

    def ends(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        assert ids.shape[0] == 1 and scores is None
        return ids[:, -1] == last

    outputs = model.generate(ROWS, max_new_tokens=12, stopping_criteria=[ends], **FREE)
    for row in (0, 1):
        new = free[row, 7:].tolist()
        cut = new.index(last) + 1 if last in new else 12
        assert outputs[row, 7:].tolist() == (new[:cut] + [0] * 12)[: outputs.shape[1] - 7]
    assert outputs[1, 7:].tolist()[4] == last
    verdicts: list[Any] = [None, False, True]
    by_verdict = [lambda *_: verdicts.pop(0)]
    ended = model.generate(ROWS[:1], max_new_tokens=12, stopping_criteria=by_verdict, **FREE)
    assert ended.shape == (1, 10) and not verdicts
    criteria = StoppingCriteriaList([MaxLengthCriteria(10)])
    assert model.generate(ROWS, max_new_tokens=12, stopping_criteria=criteria).shape == (2, 10)
    with model.inference_session(max_length=64) as session:
        one = model.generate(ROWS[1:], max_new_tokens=12, stopping_criteria=[ends], **FREE)
        two = model.generate(None, max_new_tokens=12 - (one.shape[1] - 7), **FREE)
        assert torch.equal(torch.cat([one, two], dim=1), free[1:])
        assert session.position == 19
    scores = []
    keep = dict(output_scores=True, return_dict_in_generate=True, **FREE)
    count_scores = [lambda ids, kept: scores.append(len(kept)) or False]
    model.generate(ROWS[:1], max_new_tokens=3, stopping_criteria=count_scores, **keep)
    assert scores == [1, 2, 3]


def test_stopping_criteria_see_each_accepted_draft_token(toy: Any) -> None:
    with LLM(toy, draft=make_toy("llama", max_position_embeddings=128), num_draft_tokens=4) as llm:
        model = opened(llm)
        free = model.generate(ROWS, max_new_tokens=12, **FREE)
        lengths: list[int] = []

        def third(ids: torch.Tensor, scores: Any) -> bool:
            lengths.append(ids.shape[1])
            return ids.shape[1] == 10

        outputs = model.generate(ROWS, max_new_tokens=12, stopping_criteria=[third], **FREE)
        assert torch.equal(outputs, free[:, :10]) and sorted(lengths) == [8, 8, 9, 9, 10, 10]
        assert llm.stats()["draft"]["accepted"] > 8


def test_stop_strings_and_streamers(capsys: pytest.CaptureFixture[str]) -> None:
    tok = byte_level().hf
    toy = make_toy("llama", vocab_size=340)
    with LLM(toy, tokenizer=tok, kv_memory="1MB") as llm:
        model = opened(llm)
        ids = torch.tensor([tok(text).input_ids[:4] for text in ("the lazy dog", "one two three")])
        tokenized = dict(input_ids=ids, token_type_ids=torch.zeros(2, 4), attention_mask=ids > -1)
        free, width = model.generate(**tokenized, max_new_tokens=12, **FREE), ids.shape[1]
        word = tok.decode(free[0, width + 3 : width + 5])
        outputs = model.generate(**tokenized, max_new_tokens=12, stop_strings=[word], **FREE)
        assert word in tok.decode(outputs[0]) and not outputs[0, width + 5 :].any()

        def streamed(**kwargs: Any) -> tuple[torch.Tensor, list[Any]]:
            put: list[Any] = []
            streamer = SimpleNamespace(put=put.append, end=lambda: put.append("end"))
            return model.generate(**kwargs, streamer=streamer), put

        eos = int(free[1, -4])
        outputs, (first, *columns, end) = streamed(**tokenized, max_new_tokens=9, eos_token_id=eos)
        assert torch.equal(first, ids) and end == "end"
        assert torch.equal(torch.stack(columns, dim=1), outputs[:, width:])
        with model.inference_session(max_length=64):
            model.generate(**tokenized, max_new_tokens=2, **FREE)
            _, put = streamed(inputs=None, max_new_tokens=2, **FREE)
        assert [list(ids.shape) for ids in put[:-1]] == [[2, 0], [2], [2]]
        printing = TextStreamer(tok, skip_prompt=True)
        outputs = model.generate(ids[:1], max_new_tokens=9, streamer=printing)
        assert capsys.readouterr().out == tok.decode(outputs[0, width:]) + "\n"


# ---- unsupported features

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no_length": ({}, "max_length and max_new_tokens are both None"),
    "both_lengths": (dict(max_length=9, max_new_tokens=2), "give one of them"),
    "short": (dict(max_length=7), "max_length=7 leaves no room"),
    "none_new": (dict(max_new_tokens=0), "max_new_tokens=0"),
    "limit": (dict(max_new_tokens=1000), "max_tokens=1000"),
    "greedy_copies": (dict(num_return_sequences=2), "num_return_sequences=2"),
    "many_copies": (dict(num_beams=2, num_return_sequences=3), "num_return_sequences=3"),
    "beam_sample": (dict(num_beams=2, do_sample=True), "do_sample"),
    "cold": (dict(do_sample=True, temperature=0), "temperature=0"),
    "temperature": (dict(do_sample=True, temperature=-1.0), "temperature"),
    "top_p": (dict(do_sample=True, top_p=1.5), "top_p"),
    "unknown": (dict(max_tokens=5), "max_tokens is not a parameter"),
    "groups": (dict(num_beam_groups=2), "num_beam_groups"),
    "contrastive": (dict(penalty_alpha=0.6), "penalty_alpha"),
    "guidance": (dict(guidance_scale=2.0), "guidance_scale"),
    "config": (dict(generation_config=GenerationConfig(guidance_scale=2.0)), "guidance_scale"),
    "config_kind": (dict(generation_config={"top_k": 3}), "generation_config"),
    "attentions": (dict(output_attentions=True), "output_attentions"),
    "hidden": (dict(output_hidden_states=True), "output_hidden_states"),
    "scores": (dict(output_scores=True), "needs return_dict_in_generate"),
    "beam_scores": (
        dict(output_scores=True, return_dict_in_generate=True, num_beams=2),
        "output_scores",
    ),
    "cache": (dict(cache_implementation="static"), "cache_implementation"),
    "past": (dict(past_key_values=RemotePastKeyValues()), "use a session"),
    "embeds": (dict(inputs_embeds=torch.zeros(1, 2, 3)), "inputs_embeds"),
    "assistant": (dict(assistant_model=object()), "draft="),
    "lookup": (dict(prompt_lookup_num_tokens=3), "draft="),
    "synced": (dict(synced_gpus=True), "synced_gpus"),
    "synthid": (
        dict(watermarking_config=SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2)),
        "watermarking_config",
    ),
    "criteria_beams": (dict(num_beams=2, stopping_criteria=[lambda i, s: False]), "num_beams=2"),
    "streamer": (dict(streamer=print), "streamer"),
    "stop_strings": (dict(stop_strings=["x"]), "tokenizer"),
    "processor": (dict(logits_processor=[3]), "can't be called"),
    "session": (dict(session="mine"), "session='mine'"),
    "seed": (dict(seed=-1), "seed=-1"),
    "segments": (dict(token_type_ids=torch.ones(2, 7)), "token_type_ids"),
    "mask": (dict(attention_mask=torch.ones(2, 6)), "attention_mask"),
    "right": (dict(attention_mask=torch.tensor([[1] * 7, [1] * 6 + [0]])), "on the left"),
    "twice": (dict(input_ids=ROWS), "input_ids"),
    "vocabulary": (dict(suppress_tokens=[999]), "999"),
    "stop_number": (dict(stop_strings=3), "stop_strings=3: must be a string"),
    "stop_none": (dict(stop_strings=[]), "must be a string or a list"),
    "decay": (dict(exponential_decay_length_penalty=[]), "logits processors: IndexError"),
    "watermark": (dict(watermarking_config={"a": 1}), "watermarking_config="),
    "watermark_kind": (dict(watermarking_config=3), "must be a WatermarkingConfig"),
    "large_pad": (dict(pad_token_id=2**70), "pad_token_id="),
    "large_eos": (dict(eos_token_id=2**70), "eos_token_id="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_arguments_are_rejected_before_any_forward(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model that is not whole in this process, so that transformers' `generate` can't run."""
    monkeypatch.setattr(RemoteGenerationMixin, "_whole_module", lambda self: None)
    kwargs, message = REFUSED[name]
    before = model.llm.stats()["forwards"]
    length = {} if {"max_length", "max_new_tokens"} & set(kwargs) else dict(max_new_tokens=3)
    with pytest.raises(ValueError, match=message):
        model.generate(ROWS, **({} if name == "no_length" else length), **kwargs)
    assert model.llm.stats()["forwards"] == before


OWN: dict[str, dict[str, Any]] = {
    "guidance": dict(guidance_scale=1.5),
    "guidance of a config": dict(generation_config=GenerationConfig(guidance_scale=1.5)),
    "beams that sample": dict(num_beams=3, do_sample=True),
    "hidden states": dict(output_hidden_states=True, return_dict_in_generate=True),
    "scores of beams": dict(num_beams=2, output_scores=True, return_dict_in_generate=True),
    "prompt lookup": dict(prompt_lookup_num_tokens=2),
    "synthid": dict(watermarking_config=SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=2)),
}


@pytest.mark.parametrize("name", OWN)
def test_unsupported_features_fall_back_to_transformers_generate(
    name: str, model: Any, toy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = dict(max_new_tokens=4, **OWN[name])
    ids = ROWS[:1] if name == "prompt lookup" else ROWS
    torch.manual_seed(5)
    expected, before = theirs(toy, ids, **kwargs), model.llm.stats()["forwards"]
    state = torch.get_rng_state()
    with caplog.at_level("INFO", "verbatim"):
        mine = model.generate(ids, attention_mask=torch.ones_like(ids), seed=5, **kwargs)
    assert "own loop" in caplog.text and model.llm.stats()["forwards"] == before
    assert torch.equal(torch.get_rng_state(), state)  # `seed` does not change torch's RNG state
    if "return_dict_in_generate" in kwargs:
        assert mine.keys() == expected.keys()
        mine, expected = mine.sequences, expected.sequences
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("pad", [0, EOS])
def test_only_leading_pads_are_masked_in_transformers_generate(model: Any, pad: int) -> None:
    ids = torch.tensor([[pad, pad, 9, 8], [5, pad, 8, 9]])
    kwargs: dict[str, Any] = dict(max_new_tokens=4, guidance_scale=1.5, pad_token_id=pad)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    expected = model.generate(ids, attention_mask=mask, **kwargs)
    assert torch.equal(model.generate(ids, **kwargs), expected)
    only_pad = model.generate(ids[:1, :1], **kwargs)  # BOS may be the same id
    assert torch.equal(
        only_pad, model.generate(ids[:1, :1], attention_mask=mask[:1, 2:3], **kwargs)
    )


def test_inputs_embeds_and_assistant_model_give_same_tokens(model: Any, toy: Any) -> None:
    embeds = toy.get_input_embeddings()(ROWS).detach()
    mask = torch.ones_like(ROWS)
    outputs = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=4)
    assert torch.equal(outputs, model.generate(ROWS, max_new_tokens=4)[:, ROWS.shape[1] :])
    with pytest.raises(InvalidRequest, match=r"inputs must be an integer tensor .* not list"):
        model.generate([[5, 6]], guidance_scale=2.0, max_new_tokens=2)
    row, assistant = ROWS[:1], make_toy("llama", max_position_embeddings=128, seed=9)
    outputs = model.generate(row, assistant_model=assistant, max_new_tokens=4)
    assert torch.equal(outputs, model.generate(row, max_new_tokens=4))


def test_sessions_reject_invalid_arguments(model: Any) -> None:
    for length in (0, 4096, "long"):
        with pytest.raises(InvalidRequest, match="max_length"):
            model.inference_session(max_length=length)
    with model.inference_session(seed=4) as session:
        assert session.max_length == model.llm.max_length == 128
        with pytest.raises(NotSupported, match="guidance_scale"):
            model.generate(ROWS, max_new_tokens=2, guidance_scale=2.0)
        with pytest.raises(NotSupported, match="num_return_sequences=2"):
            model.generate(ROWS, max_new_tokens=1, do_sample=True, num_return_sequences=2)
        model.generate(ROWS, max_new_tokens=1)
        with pytest.raises(InvalidRequest, match="seed=5: this session's is 4"):
            model.generate(None, max_new_tokens=1, seed=5)
        for wrong in (-1, "x", 1.5):
            with pytest.raises(InvalidRequest, match="seed="):
                session.seed = wrong
        assert session.seed == 4


# ---- opening


def test_from_pretrained_opens_llm_live_module_and_folder(
    model: Any, toy: Any, tmp_path: Path
) -> None:
    assert type(model) is DistributedLlamaForCausalLM and isinstance(model, RemoteGenerationMixin)
    assert model.eval() is model.to("cpu") is model and model.device == torch.device("cpu")
    with pytest.raises(InvalidRequest, match="model_type 'bloom', but this is 'llama'"):
        DistributedBloomForCausalLM.from_pretrained(model.llm)
    with pytest.raises(NotSupported, match="cuda"):
        model.to("cuda")
    with pytest.raises(InvalidRequest, match="open already"):
        opened(model.llm, torch_dtype="auto")

    class Mixed(RemoteGenerationMixin):
        llm = model.llm

    toy.save_pretrained(tmp_path)
    options = dict(torch_dtype=torch.float32, low_cpu_mem_usage=True, kv_memory="1MB")
    live, loaded = opened(toy), opened(str(tmp_path), **options)
    for other in (Mixed(), live, loaded):
        ids = other.generate(ROWS, max_new_tokens=3)
        assert torch.equal(ids, model.generate(ROWS, max_new_tokens=3))
    live.llm.close()
    llm = loaded.llm
    loaded.close()
    loaded.close()
    with pytest.raises(EngineClosed):
        loaded.generate(ROWS, max_new_tokens=3)
    assert llm.engine.closed and not model.llm.engine.closed
    with pytest.raises(InvalidRequest, match="'bloom'"):
        DistributedBloomForCausalLM.from_pretrained(str(tmp_path))


class Opened(Exception):
    """Raised instead of opening an engine."""


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {}),
        (dict(revision="x", torch_dtype="auto"), dict(revision="x", dtype="auto")),
        (dict(initial_peers=None, token=None, max_retries=None), {}),
        (dict(stages=3), dict(placement=Cluster(stages=3))),
        (dict(initial_peers=["h:6379"]), dict(placement=Cluster(address="h:6379"))),
        (
            dict(initial_peers="h:1", stages=2, request_timeout=9.0, max_retries=1),
            dict(placement=Cluster(address="h:1", stages=2, step_timeout_s=9.0, max_restarts=1)),
        ),
        (dict(placement=Cluster(stages=2)), dict(placement=Cluster(stages=2))),
    ],
    ids=["plain", "dtype", "nones", "stages", "peers", "timeouts", "placement"],
)
def test_from_pretrained_options_map_to_llm_options(
    options: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def llm(name: str, **kwargs: Any) -> LLM:
        raise Opened(name, kwargs)

    stand_in = type("LLM", (), {"__new__": lambda _, *a, **k: llm(*a, **k)})
    monkeypatch.setattr(petals_model, "LLM", stand_in)
    with pytest.raises(Opened) as given:
        opened("name", **options)
    assert given.value.args == ("name", wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(initial_peers=["/ip4/1.2.3.4/tcp/31337/p2p/Qm"]), "host:port"),
        (dict(initial_peers=["a:1", "b:1"]), "one address"),
        (dict(initial_peers=[]), "one address"),
        (dict(initial_peers=["a:1"], placement=Cluster()), "placement"),
        (dict(request_timeout=3.0), "step_timeout_s"),
        (dict(dht_prefix="x"), "dht_prefix"),
        (dict(allowed_servers=["x"]), "allowed_servers"),
        (dict(use_server_to_server=False), "use_server_to_server"),
        (dict(low_cpu_mem_usage=False), "low_cpu_mem_usage"),
        (dict(token="x"), "HF_TOKEN"),
        (dict(tuning_mode="ptune"), "tuning_mode"),
        (dict(torch_dtype="auto", dtype="auto"), "same thing"),
        (dict(banana=1), "banana is not known"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_from_pretrained_options_are_rejected(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened("name", **options)


# ---- the module itself


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_module_attributes_are_available_if_model_is_whole(name: str) -> None:
    module = make_toy(name)
    model = DistributedModelForCausalLM(module)
    module.train()
    logits = model(ROWS, use_cache=False).logits
    assert module.training
    assert torch.equal(logits, model.forward(input_ids=ROWS).logits)
    module.eval()
    with torch.no_grad():
        assert torch.equal(logits, module(ROWS).logits)
    layers = getattr(module.base_model, {"llama": "layers"}.get(name, "h"))
    assert list(model.transformer.h) == list(layers)
    assert model.transformer.config is module.config
    assert model.lm_head is module.lm_head and model.dtype is torch.float32
    assert [id(p) for p in model.parameters()] == [id(p) for p in module.parameters()]
    for missing in ("lm_heads", "_lm_head"):
        assert not hasattr(model, missing) and not hasattr(model.transformer, missing)
    for call in (lambda: model.cuda(), lambda: model.half(), lambda: model.train()):
        with pytest.raises(NotSupported, match="from_pretrained"):
            call()


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2", "falcon"])
def test_hidden_states_through_session_match_whole_model(name: str) -> None:
    """As in Petals' own test: with empty steps, one column at a time, and all at once."""
    module = make_toy(name)
    model = DistributedModelForCausalLM(module)
    body, seen = model.transformer, []
    keep = lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"])
    hook = body.h[0].register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        expected = module(ROWS).logits
        hook.remove()
        for widths in ([1] * ROWS.shape[1], [0, 2, 0, ROWS.shape[1] - 2], [ROWS.shape[1]]):
            with body.h.inference_session(max_length=ROWS.shape[1]) as session:
                parts = seen[0].split(widths, dim=1)
                outputs = torch.cat([session.step(part) for part in parts], dim=1)
                assert session.position == ROWS.shape[1]
                with pytest.raises(PromptTooLong, match="max_length"):
                    session.step(seen[0][:, :1])
            logits = model.lm_head(body.ln_f(outputs))
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    if name in ("llama", "bloom"):
        embeddings = body.word_embeddings_layernorm(body.word_embeddings(ROWS))
        assert torch.equal(embeddings, seen[0])
    assert len(model.generate(ROWS, max_new_tokens=3)) == len(ROWS)


def test_session_rejects_mixing_ids_and_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedModelForCausalLM(make_toy("llama"))
    hidden = torch.zeros(2, 1, model.config.hidden_size)
    with model.inference_session(max_length=9) as session:
        session.step(hidden)
        with pytest.raises(InvalidRequest, match="hidden states"):
            model.generate(ROWS[:, :2], max_new_tokens=1)
        with pytest.raises(NotSupported, match="hypo_ids"):
            session.step(hidden, hypo_ids=torch.tensor([1, 0]))
    with model.inference_session(max_length=9) as session:
        model.generate(ROWS[:, :2], max_new_tokens=1)
        with pytest.raises(InvalidRequest, match="holds token ids"):
            session.step(hidden)
    monkeypatch.setattr(type(model.llm.engine), "module", None)
    session = model.inference_session(max_length=9)
    with pytest.raises(NotSupported, match="not whole and unquantized"):
        session.step(hidden)


def test_session_survives_layer_error_if_its_cache_can_be_cropped() -> None:
    model = opened(make_toy("llama"))
    hidden = torch.randn(1, 2, 64)

    def fail(*_: Any) -> None:
        raise ValueError("a layer's")

    with model.inference_session(max_length=9) as session:
        first = session.step(hidden)
        assert not first.requires_grad
        with pytest.raises(InvalidRequest, match="rows"):
            session.step(hidden.expand(2, 2, 64))
        with pytest.raises(InvalidRequest, match="hidden states"):
            session.step(torch.tensor([[1]]))
        hook = model.transformer.h[1].register_forward_hook(fail)
        with pytest.raises(ValueError, match="a layer's"):
            session.step(hidden)
        hook.remove()
        second = session.step(hidden)
        with model.inference_session(max_length=9) as whole:
            together = whole.step(torch.cat([hidden, hidden], dim=1))
            whole.position = 2
            torch.testing.assert_close(whole.step(hidden), second)
            whole.position = 0
            assert whole.step(hidden.expand(2, 2, 64)).shape == (2, 2, 64)
        torch.testing.assert_close(torch.cat([first, second], dim=1), together)
        session._hidden.layers[0].is_croppable = False
        with pytest.raises(NotSupported, match="position=1"):
            session.position = 1
        hook = model.transformer.h[1].register_forward_hook(fail)
        with pytest.raises(ValueError, match="a layer's"):
            session.step(hidden)
        hook.remove()
        with pytest.raises(EngineClosed, match="session"):
            session.step(hidden)
    assert sum(1 for _ in model.transformer.h.parameters())


def test_module_attributes_raise_if_model_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedModelForCausalLM(make_toy("llama"))
    monkeypatch.setattr(RemoteGenerationMixin, "_whole_module", lambda self: None)
    for call in (
        lambda: model(ROWS), lambda: model.forward(ROWS), lambda: model.transformer.h,
        lambda: model.lm_head, lambda: model.dtype, lambda: model.parameters(),
    ):  # fmt: skip
        with pytest.raises(NotSupported, match=r"not whole in this process.*llm\.score"):
            call()
    assert not hasattr(model, "lm_head")

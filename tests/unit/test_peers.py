"""The benchmark against other engines: its limits, table, worker protocol, file conversions and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.programs import environment, started, state_of, until

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.peers.__main__ import arguments
from benchmarks.peers.checkpoint import Checkpoint
from benchmarks.peers.client import ROOT, Peer, PeerFailed
from benchmarks.peers.protocol import decode, encode
from benchmarks.peers.run import BF16_ALONE, SYSTEMS, Plan, Run, module_command, relative_error
from benchmarks.peers.setup import ENVIRONMENT, REQUIREMENTS, peers_python, pip_line
from benchmarks.peers.shape import FORMATS, Machine, Shape
from benchmarks.peers.table import OURS, OURS_A8, Cell, Measured, markdown, rows_of, text
from benchmarks.peers.weights import SHAPES, make_random
from verbatim.bench import plan

SHAPE = Shape(2, 256, 512, 4, 2, 64, 1000)
EXPERTS = Shape(2, 256, 128, 4, 2, 64, 1000, experts=16, experts_per_token=4)

FAKE = """
import sys, numpy as np
from benchmarks.peers.protocol import serve

class Fake:
    def about(self):
        print("a library prints")
        return {"version": "1"}
    def load(self, fmt, **setup):
        if fmt != "bf16":
            raise ValueError(f"fmt={fmt!r}: not mine")
        return {}
    def check(self, prompts, forced):
        return np.arange(6, dtype=np.float32).reshape(2, 3)
    def decode(self, rows, length, steps, seconds):
        return [0.5] * steps
    def prefill(self, length):
        sys.exit("out of memory")

serve(Fake())
"""


@pytest.fixture
def fake():
    with Peer("fake", [sys.executable, "-c", FAKE], timeout_s=240) as peer:
        yield peer


def test_worker_answers_reports_errors_and_is_suspended_between_calls(fake):
    assert fake.call("about") == {"version": "1"}
    until(lambda: state_of(fake._process.pid) == "T")  # signals are asynchronous
    assert fake.call("check", prompts=[], forced=[]).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(PeerFailed, match=r"fake, load: ValueError: fmt='int8': not mine"):
        fake.call("load", fmt="int8", folder="x")
    with pytest.raises(PeerFailed, match="must be one of"):
        fake.call("format_disk")
    assert fake.call("decode", rows=1, length=1, steps=3, seconds=1.0) == [0.5] * 3
    assert fake.alive


def test_dead_worker_is_reported_with_its_last_output(fake):
    with pytest.raises(PeerFailed, match=r"fake ended in 'prefill': out of memory"):
        fake.call("prefill", length=8)
    assert not fake.alive


def test_encoded_arrays_decode_to_the_same_bytes():
    array = np.array([[1.5, np.nan], [-0.0, np.inf]], np.float32)
    assert decode(json.loads(json.dumps(encode(array)))).tobytes() == array.tobytes()
    assert decode(encode({"seconds": [1.0]})) == {"seconds": [1.0]}


@pytest.mark.parametrize(("each_s", "number"), [(3.0, 3), (1.0, 3), (0.5, 4), (0.1, 4)])
def test_timing_ends_after_a_number_of_steps_or_seconds(monkeypatch, each_s, number):
    monkeypatch.setattr(plan, "seconds", lambda step: each_s)
    assert plan.step_times(lambda: None, 4, most_s=2.0) == [each_s] * number


def test_weight_and_kv_bytes_of_a_step():
    assert SHAPE.layer_weights == 2 * (256 * 64 * 12 + 3 * 256 * 512)
    assert SHAPE.weight_bytes("bf16", 8) == 2 * (SHAPE.layer_weights + 256 * 1000)
    assert SHAPE.weight_bytes("int4", 4) == 0.5625 * (SHAPE.layer_weights + 256 * 1000)
    assert SHAPE.weight_bytes("int4", 8) == 0.5625 * SHAPE.layer_weights + 1.0625 * 256 * 1000
    assert SHAPE.kv_bytes("16bit") == 2 * 2 * 2 * 64 * 2


def test_limit_is_memory_bandwidth_for_one_row_and_flops_for_many():
    machine = Machine(bandwidth=1e9, flops=1e12)
    read = SHAPE.weight_bytes("bf16", 8) + 100 * SHAPE.kv_bytes("16bit")
    assert machine.decode_limit_s(SHAPE, "bf16", "16bit", 8, 1, 100) == read / 1e9
    slow = Machine(bandwidth=1e9, flops=1e9)
    products = 64 * (SHAPE.layer_weights + 256 * 1000) + 2 * 64 * 2 * 4 * 64
    assert slow.decode_limit_s(SHAPE, "bf16", "16bit", 8, 64, 1) == 2 * products / 1e9
    prompt = 10 * SHAPE.layer_weights + 256 * 1000 + 2 * 55 * 2 * 4 * 64
    assert slow.prefill_limit_s(SHAPE, "bf16", 8, 10) == 2 * prompt / 1e9


def test_limit_counts_bytes_of_distinct_experts_and_flops_of_chosen_ones():
    attention_and_router, expert, head = 256 * 64 * 12 + 256 * 16, 3 * 256 * 128, 256 * 1000
    assert EXPERTS.layer_weights == 2 * (attention_and_router + 4 * expert)
    assert [EXPERTS.distinct_experts(rows) for rows in (1, 2, 3)] == [4, 7, 9.25]
    assert EXPERTS.distinct_experts(1000) == 16
    read = [2 * (2 * (attention_and_router + n * expert) + head) for n in (4, 7)]
    assert [EXPERTS.weight_bytes("bf16", 8, rows) for rows in (1, 2)] == read
    memory, arithmetic = Machine(1e9, 1e15), Machine(1e15, 1e9)
    kv = 2 * 100 * EXPERTS.kv_bytes("16bit")
    assert memory.decode_limit_s(EXPERTS, "bf16", "16bit", 8, 2, 100) == (read[1] + kv) / 1e9
    assert memory.prefill_limit_s(EXPERTS, "bf16", 8, 2) == read[1] / 1e9
    products = 8 * (EXPERTS.layer_weights + head) + 2 * 8 * 2 * 4 * 64
    assert arithmetic.decode_limit_s(EXPERTS, "bf16", "16bit", 8, 8, 1) == 2 * products / 1e9


def test_sliding_window_layer_reads_only_its_window():
    shape = Shape(3, 256, 512, 4, 2, 64, 1000, sliding=2, window=16)
    assert [shape.visible(tokens) for tokens in (10, 16, 100)] == [30, 48, 132]
    assert shape.kv_bytes("16bit") == 3 * 2 * 2 * 64 * 2
    assert shape.kv_bytes("16bit", 100) == 132 * 2 * 2 * 64 * 2
    read = shape.weight_bytes("bf16", 8) + 4 * 132 * 2 * 2 * 64 * 2
    assert Machine(1e9, 1e15).decode_limit_s(shape, "bf16", "16bit", 8, 4, 100) == read / 1e9
    pairs = 210 + 2 * (16 * 17 // 2 + 4 * 16)  # of 20 queries, in one full and two sliding layers
    prompt = 20 * shape.layer_weights + 256 * 1000 + 2 * pairs * 4 * 64
    assert Machine(1e15, 1e9).prefill_limit_s(shape, "bf16", 8, 20) == 2 * prompt / 1e9


def entry(ours: float, *, rows: int = 8, limit: float = 0.01) -> Measured:
    """A measurement in which llama.cpp takes 20 ms and OpenVINO 40."""
    seconds = {"Verbatim": [ours, 9.0, ours], "llama.cpp": [0.02], "OpenVINO": [0.04]}
    return Measured(Cell("int8", 128, rows), [1.0, limit, limit / 2], seconds)


def test_ratio_is_to_the_fastest_peer_by_median_times():
    measured = entry(0.016)
    assert measured.tokens_per_s("Verbatim") == 500
    assert measured.best_peer == ("llama.cpp", 400)
    assert measured.ratio == 1.25
    assert measured.limit == 800
    assert measured.fraction == 0.625
    assert measured.goal == 480
    assert measured.reached


@pytest.mark.parametrize(
    ("measured", "reached"),
    [
        (entry(0.018), False),  # 1.11 times the best, 56 % of the limit
        (entry(0.018, limit=0.017), True),  # 94 % of the limit
        (entry(0.02, rows=0), True),  # prefill: as fast as the best
        (entry(0.021, rows=0), False),
    ],
    ids=["too-slow", "at-the-limit", "prefill", "slow-prefill"],
)
def test_goal_is_reached_by_ratio_or_by_share_of_the_limit(measured, reached):
    assert measured.reached is reached


def test_missing_measurements_are_blank_in_the_table():
    alone = Measured(Cell("int4", 1024, 1), [0.01], {"OpenVINO": [0.05]})
    assert (alone.ratio, alone.fraction, alone.reached) == (None, None, None)
    table = rows_of([alone, entry(0.016)], ["Verbatim", "OpenVINO"])
    assert table[1] == ["int4", "1,024", "1", "", "20.0", "100", "", "", ""]
    assert table[2] == ["int8", "128", "8", "500", "200", "800", "1.25", "62 %", "reached"]
    assert markdown(table).splitlines()[1] == "| " + " | ".join(["---"] * 9) + " |"
    assert len({len(line) for line in text(table).splitlines()}) == 1


def test_relative_error_distinguishes_wrong_logits_from_rounding():
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((2, 1000)).astype(np.float32)
    near = reference + 0.01 * rng.standard_normal((2, 1000))
    assert relative_error(near, reference) == pytest.approx(0.01, rel=0.1)
    assert relative_error(rng.standard_normal((2, 1000)), reference) > 1.2
    assert relative_error(np.full((2, 1000), np.nan), reference) == np.inf


def test_missing_peer_is_left_out_with_its_install_command(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config(SHAPE)))
    run = Run(Plan(["OpenVINO"], [], [], [32], [], threads=1), tmp_path, tmp_path / "none")
    run.prepare("0.6b", None)
    assert run.systems == []
    assert any(line.startswith("OpenVINO is left out") for line in run.remarks)
    assert any(pip_line("OpenVINO", tmp_path / "none") in line for line in run.remarks)
    assert "openvino==" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompt", "layers", "message"),
    [(32, 3, "holds weights of"), (60, None, "74 tokens in a row are more than the model's 64")],
    ids=["other-weights", "too-long"],
)
def test_run_with_other_weights_or_too_long_prompts_is_rejected(tmp_path, prompt, layers, message):
    (tmp_path / "config.json").write_text(json.dumps(config(SHAPE)))
    run = Run(Plan([], [], [1], [prompt], []), tmp_path, tmp_path)
    with pytest.raises(SystemExit, match=message):
        run.prepare("0.6b", layers)


def config(shape: Shape) -> dict[str, object]:
    return {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": 64,
    }


def test_every_system_has_a_module_and_every_option_a_default():
    folder = Path(__file__).parents[2] / "benchmarks" / "peers" / "systems"
    assert all((folder / f"{module}.py").exists() for module in SYSTEMS.values())
    assert set(REQUIREMENTS) | set(BF16_ALONE) | {OURS, OURS_A8} == set(SYSTEMS)
    options = arguments().parse_args([])
    assert (options.rows, options.prompts, options.prefills) == (
        [1, 8, 32],
        [128, 1024],
        [512, 2048],
    )


def test_checkpoint_gives_shape_and_float32_weights(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    weight = torch.randn(4, 6, dtype=torch.bfloat16)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config(SHAPE)))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.shape == SHAPE
    assert np.array_equal(checkpoint.floats("w"), weight.float().numpy())


@pytest.fixture(scope="module", params=["moe-toy", "gpt-oss-toy"])
def experts(request, tmp_path_factory):
    """The folder of a saved mixture-of-experts model, and the model."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp(request.param)
    model = make_random(**SHAPES[request.param])
    model.save_pretrained(folder)
    return folder, model


def test_shape_of_a_mixture_of_experts_checkpoint(experts):
    folder, model = experts
    shape = Checkpoint(folder).shape
    assert (shape.intermediate, shape.experts, shape.experts_per_token) == (128, 16, 4)
    assert (shape.sliding, shape.window) == (
        (1, 16) if model.config.model_type == "gpt_oss" else (0, 0)
    )
    matrices = [p.numel() for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    matrices += [p.numel() for name, p in model.named_parameters() if p.ndim == 3]
    matrices += [2 * 16 * 256, 1024 * 256]  # routers and head
    assert 2 * sum(matrices) == shape.weight_bytes("bf16", 8, 10**6)


@pytest.mark.parametrize("name", ["qwen3.5-toy", "lfm2-toy", "granite-toy"])
def test_shape_of_a_checkpoint_with_recurrent_layers(name, tmp_path):
    from verbatim import LLM

    model = make_random(**SHAPES[name])
    model.save_pretrained(tmp_path)
    shape = Checkpoint(tmp_path).shape
    matrices = [p.numel() for p in model.parameters() if p.ndim == 2]  # the head is tied
    assert shape.weight_bytes("bf16", 8) == 2 * sum(matrices)
    with LLM(model, kv_memory=10**8) as llm:
        info = llm.info()
    assert shape.state_bytes == info["state_bytes"]
    assert shape.kv_bytes("16bit") == info["kv_bytes_per_token"]


@pytest.mark.parametrize("name", ["qwen3.5-toy", "lfm2-toy", "granite-toy"])
def test_recurrent_layers_are_converted_to_gguf_tensors(name, tmp_path):
    pytest.importorskip("gguf")
    from benchmarks.peers.gguf_file import gguf_tensors

    model = make_random(**SHAPES[name])
    model.save_pretrained(tmp_path)
    written = {tensor: next(iter(parts)) for tensor, parts in gguf_tensors(Checkpoint(tmp_path))}
    layer = model.model.layers[0]
    if name == "granite-toy":  # gate and up are one matrix in transformers
        assert len(written) == len(list(model.parameters())) + len(model.model.layers)
        gate_up = layer.shared_mlp.input_linear.weight.detach().float()
        assert np.array_equal(written["blk.0.ffn_up.weight"], gate_up[512:])
        assert np.allclose(written["blk.0.ssm_a"][:, 0], -layer.mamba.A_log.detach().float().exp())
        return
    assert len(written) == len(list(model.parameters()))
    if name == "lfm2-toy":
        taps = written["blk.0.shortconv.conv.weight"]
        assert np.array_equal(taps, layer.conv.conv.weight.detach().float()[:, 0])
        return
    mixer = layer.linear_attn
    assert np.allclose(written["blk.0.ssm_a"], -mixer.A_log.detach().float().exp())
    assert np.array_equal(written["blk.0.ssm_norm.weight"], mixer.norm.weight.detach().float())
    norm = 1 + layer.input_layernorm.weight.detach().float()
    assert np.array_equal(written["blk.0.attn_norm.weight"], norm)


def test_experts_are_stacked_in_gguf_tensors(experts):
    pytest.importorskip("gguf")
    from benchmarks.peers.gguf_file import gguf_tensors

    folder, model = experts
    written = {name: list(parts) for name, parts in gguf_tensors(Checkpoint(folder))}
    layer = model.model.layers[1]
    both = layer.mlp.experts.gate_up_proj.detach().float()  # [experts, 2 x 128, 256]
    down = layer.mlp.experts.down_proj.detach().float()
    if model.config.model_type == "gpt_oss":
        both, down = both.mT, down.mT
        gate, up = both[:, ::2], both[:, 1::2]
        biases = layer.mlp.experts.gate_up_proj_bias.detach().float()
        assert np.array_equal(np.stack(written["blk.1.ffn_up_exps.bias"]), biases[:, 1::2])
        assert np.array_equal(
            written["blk.1.attn_sinks.weight"][0], layer.self_attn.sinks.detach().float()
        )
        own = ["post_attention_norm.weight", "attn_sinks.weight", "ffn_gate_inp.bias"]
        own += [f"attn_{part}.bias" for part in ("q", "k", "v", "output")]
        own += [f"ffn_{part}_exps.bias" for part in ("gate", "up", "down")]
        outer = {"output.weight"}
    else:
        gate, up = both.chunk(2, 1)
        own, outer = [f"{part}_norm.weight" for part in ("attn_q", "attn_k", "ffn")], set()
    for part, values in (("gate", gate), ("up", up), ("down", down)):
        assert np.array_equal(np.stack(written[f"blk.1.ffn_{part}_exps.weight"]), values)
    own += [f"ffn_{part}.weight" for part in ("gate_inp", "gate_exps", "up_exps", "down_exps")]
    own += [f"attn_{part}.weight" for part in ("norm", "q", "k", "v", "output")]
    outer |= {"token_embd.weight", "output_norm.weight"}
    assert set(written) == outer | {f"blk.{n}.{name}" for n in range(2) for name in own}


def test_gguf_file_has_expert_counts_and_float32_routers(experts, tmp_path):
    gguf = pytest.importorskip("gguf")
    from benchmarks.peers.gguf_file import write_gguf

    folder, model = experts
    write_gguf(Checkpoint(folder), "int4", 8, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    oss = model.config.model_type == "gpt_oss"
    name = "gpt-oss" if oss else "qwen3moe"
    assert reader.fields["general.architecture"].contents() == name
    numbers = {"expert_count": 16, "expert_used_count": 4, "expert_feed_forward_length": 128}
    if oss:
        numbers["attention.sliding_window"] = 16
    assert {key: reader.fields[f"{name}.{key}"].contents() for key in numbers} == numbers
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.ffn_down_exps.weight"] == types["blk.0.attn_q.weight"] == "Q4_0"
    assert types["token_embd.weight"] == types.get("output.weight", "Q8_0") == "Q8_0"


def test_benchmark_rows_continue_from_different_ids():
    pytest.importorskip("torch")
    from verbatim import LLM
    from verbatim.bench.peers import Ours

    with LLM(make_random(**SHAPES["moe-toy"])) as llm:
        rows = Ours(llm)
        requests = rows.add([[1, 2, 3]] * 4, max_tokens=8)
        rows._skip_prefill(requests)
        llm.engine.step()
        fed, drawn = zip(*(request.sequences[0].output_ids for request in requests), strict=True)
        for request in requests:
            llm.engine.abort(request)
    assert len(set(fed)) == len(set(drawn)) == 4


DRIVER = """
import sys, time
from benchmarks.peers.client import Peer
peer = Peer("fake", [sys.executable, "-c", {fake!r}])
peer.call("about")
print(peer._process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells a child of it")
def test_suspended_worker_dies_when_its_driver_is_killed():
    line = [sys.executable, "-c", DRIVER.format(fake=FAKE)]
    with started(line, stdout=subprocess.PIPE, env=environment(within_reach=ROOT)) as driver:
        worker = int(driver.stdout.readline())
    until(lambda: state_of(worker) == "Z")


have_peers = pytest.mark.skipif(
    not peers_python(ENVIRONMENT).exists(), reason="python -m benchmarks.peers.setup was not run"
)


@pytest.mark.slow
@have_peers
def test_installed_peers_run_a_toy_model_in_every_format(tmp_path):
    plan = Plan(["llama.cpp", "OpenVINO"], list(FORMATS), [1, 3], [20], [40], rounds=1, steps=3)
    run = Run(plan, tmp_path, ENVIRONMENT)
    run.prepare("toy", None)
    run.measure()
    assert run.systems == plan.systems
    assert len(run.measured) == 9
    assert all(set(measured.seconds) == set(plan.systems) for measured in run.measured)
    errors = [line for line in run.remarks if "differ from transformers' bf16" in line]
    assert len(errors) == len(run.remarks) == 6


def test_another_setting_of_verbatim_is_not_counted_as_a_peer():
    seconds = {OURS: [1.0], OURS_A8: [0.1], "OpenVINO": [0.5]}
    assert Measured(Cell("int8", 20, 1), [0.2], seconds).best_peer == ("OpenVINO", 2.0)


def run_toy(folder: Path, shape: str, rounds: int) -> None:
    plan = Plan(
        [OURS, OURS_A8, "transformers"],
        ["bf16", "int4"],
        [1, 3],
        [20],
        [40],
        rounds=rounds,
        steps=3,
    )
    run = Run(plan, folder, folder)
    run.prepare(shape, None)
    run.measure()
    assert run.systems == plan.systems
    cells = ["prompt 20, 1 row", "prompt 20, 3 rows", "prompt 40, prefill"]
    assert [str(e.cell) for e in run.measured] == [
        f"{fmt}, {cell}" for fmt in plan.formats for cell in cells
    ]
    for measured in run.measured:
        count = rounds * plan.steps if measured.cell.is_decode else rounds
        # transformers runs bf16 only, and quantized activations need quantized weights.
        other = "transformers" if measured.cell.fmt == "bf16" else OURS_A8
        assert {name: len(times) for name, times in measured.seconds.items()} == {
            OURS: count,
            other: count,
        }
    assert len([line for line in run.remarks if "differ from transformers' bf16" in line]) == 3
    assert json.loads(json.dumps(run.as_json()))["cells"][1]["rows"] == 3


@pytest.mark.slow
def test_verbatim_and_transformers_run_a_toy_model(tmp_path):
    run_toy(tmp_path, "toy", rounds=2)


class LastingPeer(Peer):
    """A worker that serves several runs: instead of ending, it unloads its model."""

    loaded = False

    def call(self, do, **arguments):
        answer = super().call(do, **arguments)
        self.loaded = {"load": True, "unload": False}.get(do, self.loaded)
        return answer

    def __exit__(self, *_):
        if self.loaded:
            self.call("unload")

    def end(self):
        super().__exit__()


@pytest.fixture(scope="module")
def start_once():
    """Replacement for `Run.start`: one process per system serves all runs of the module."""
    peers = {}

    def start(run, name):
        if name not in peers:
            peers[name] = LastingPeer(name, module_command(SYSTEMS[name]))
        return peers[name]

    yield start
    for peer in peers.values():
        peer.end()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["moe-toy", "qwen3.5-toy"])
def test_reused_workers_run_models_of_other_shapes(tmp_path, shape, start_once, monkeypatch):
    make_random(**SHAPES[shape]).save_pretrained(tmp_path)
    (tmp_path / "peers.json").write_text(json.dumps({"shape": shape, "layers": None}))
    monkeypatch.setattr(Run, "start", start_once)
    run_toy(tmp_path, shape, rounds=1)

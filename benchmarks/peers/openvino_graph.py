"""A Qwen3 checkpoint as an OpenVINO graph, in the form that its CPU plugin fuses.

OpenVINO's exporters write this form: K and V are states, which pass through a gather by `beam_idx` and a
concatenation to scaled dot product attention; RMS norms and rotary embeddings are elementary operations;
and compressed weights are integers that are multiplied by a scale. Only the last position has logits.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

from benchmarks.peers.checkpoint import Checkpoint

GROUP = 64  # of 4-bit weights, as in Verbatim; 8-bit weights have a scale per row, the plugin's fastest form


def build(
    checkpoint: Checkpoint, fmt: str, head_bits: int
) -> tuple[ov.Model, int, list[np.ndarray]]:
    """Return the model, the stored bytes of its matrices, and the arrays that must outlive it.

    Inputs, named as by the exporters: `input_ids` and `position_ids` `[rows, tokens]` int64, `beam_idx`
    `[rows]` int32. Output: `[rows, 1, vocab]`.
    """
    graph = _Graph(checkpoint, fmt)
    shape = checkpoint.shape
    ids = op.parameter([-1, -1], ov.Type.i64)
    positions = op.parameter([-1, -1], ov.Type.i64)
    beams = op.parameter([-1], ov.Type.i32)
    for node, name in ((ids, "input_ids"), (positions, "position_ids"), (beams, "beam_idx")):
        node.output(0).set_names({name})
    graph.start(positions, beams, op.gather(op.shape_of(ids), ints([0]), ints(0)))
    table = graph.constant(checkpoint.bits("model.embed_tokens.weight"), ov.Type.bf16)
    hidden = op.convert(op.gather(table, ids, ints(0)), "f32")
    for layer in range(shape.layers):
        hidden = graph.layer(hidden, f"model.layers.{layer}.")
    hidden = op.gather(hidden, ints([-1]), ints(1))  # the last position: [rows, 1, hidden]
    hidden = graph.norm(hidden, "model.norm.weight")
    head_fmt = "int8" if fmt == "int4" and head_bits == 8 else fmt
    logits = graph.linear(hidden, "model.embed_tokens.weight", head_fmt)
    results = [op.result(logits, name="logits")]
    model = ov.Model(results, graph.sinks, [ids, positions, beams], "qwen3")
    return model, graph.nbytes, graph.arrays


def ints(value: int | list[int]) -> ov.Node:
    return op.constant(value, np.int64)


class _Graph:
    def __init__(self, checkpoint: Checkpoint, fmt: str) -> None:
        self.checkpoint, self.fmt, self.shape = checkpoint, fmt, checkpoint.shape
        self.sinks: list[ov.Node] = []
        self.arrays: list[np.ndarray] = []
        self.nbytes = 0

    def constant(self, data: np.ndarray, kind: ov.Type, shape: list[int] | None = None) -> ov.Node:
        """Return a constant of type `kind` that shares the memory of `data`."""
        data = np.ascontiguousarray(data)
        self.arrays.append(data)
        tensor = ov.Tensor(data, shape or list(data.shape), kind)
        return op.constant(tensor, shared_memory=True)

    def start(self, positions: ov.Node, beams: ov.Node, batch: ov.Node) -> None:
        """Build what all layers share: cos/sin, the mask, and the initial states."""
        shape = self.shape
        half = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
        angles = np.outer(np.arange(self.checkpoint.context), shape.rope_theta**-half)
        angles = np.concatenate([angles, angles], 1)
        self.cos, self.sin = (
            op.unsqueeze(op.gather(op.constant(f(angles), np.float32), positions, ints(0)), ints(1))
            for f in (np.cos, np.sin)
        )
        self.beams = beams
        empty = op.concat([batch, ints([shape.kv_heads, 0, shape.head_dim])], 0)
        self.empty = op.broadcast(op.constant(0.0, np.float32), empty)
        # A key at position j is visible from position p if j <= p.
        last = op.gather(positions, ints([-1]), ints(1))
        end = op.add(op.reduce_max(last, ints([0, 1])), ints(1))
        keys = op.range(ints(0), end, ints(1), "i64")
        visible = op.less_equal(keys, op.unsqueeze(positions, ints([1, 3])))
        minimum = op.constant(float(np.finfo(np.float32).min), np.float32)
        self.mask = op.select(visible, op.constant(0.0, np.float32), minimum)

    def layer(self, hidden: ov.Node, name: str) -> ov.Node:
        x = self.norm(hidden, name + "input_layernorm.weight")
        hidden = op.add(hidden, self.attention(x, name + "self_attn."))
        x = self.norm(hidden, name + "post_attention_layernorm.weight")
        gate = op.swish(self.linear(x, name + "mlp.gate_proj.weight"))
        up = self.linear(x, name + "mlp.up_proj.weight")
        return op.add(hidden, self.linear(op.multiply(gate, up), name + "mlp.down_proj.weight"))

    def attention(self, x: ov.Node, name: str) -> ov.Node:
        shape = self.shape
        q = self.heads(x, name + "q_proj.weight", shape.heads, name + "q_norm.weight")
        k = self.heads(x, name + "k_proj.weight", shape.kv_heads, name + "k_norm.weight")
        v = self.heads(x, name + "v_proj.weight", shape.kv_heads, None)
        q, k = self.rotated(q), self.rotated(k)
        k, v = self.with_past(k, name + "key"), self.with_past(v, name + "value")
        out = op.scaled_dot_product_attention(q, k, v, self.mask)
        out = op.transpose(out, ints([0, 2, 1, 3]))
        out = op.reshape(out, ints([0, 0, shape.heads * shape.head_dim]), True)
        return self.linear(out, name + "o_proj.weight")

    def heads(self, x: ov.Node, weight: str, heads: int, norm: str | None) -> ov.Node:
        x = op.reshape(self.linear(x, weight), ints([0, 0, heads, self.shape.head_dim]), True)
        if norm is not None:
            x = self.norm(x, norm)
        return op.transpose(x, ints([0, 2, 1, 3]))

    def rotated(self, x: ov.Node) -> ov.Node:
        half, width, one = ints([self.shape.head_dim // 2]), ints([2**31 - 1]), ints([1])
        first = op.slice(x, ints([0]), half, one, ints([3]))
        second = op.slice(x, half, width, one, ints([3]))
        swapped = op.concat([op.multiply(second, op.constant(-1.0, np.float32)), first], -1)
        return op.add(op.multiply(x, self.cos), op.multiply(swapped, self.sin))

    def with_past(self, new: ov.Node, name: str) -> ov.Node:
        """Append keys or values to the state; return all of them, repeated for the heads that share them."""
        shape = self.shape
        info = VariableInfo()
        info.data_shape = ov.PartialShape([-1, shape.kv_heads, -1, shape.head_dim])
        info.data_type = ov.Type.f32
        info.variable_id = name
        variable = Variable(info)
        past = op.gather(op.read_value(self.empty, variable), self.beams, ints(0))
        both = op.concat([past, new], 2)
        self.sinks.append(op.assign(both, variable))
        if shape.heads == shape.kv_heads:
            return both
        size = op.shape_of(both)
        repeats = shape.heads // shape.kv_heads
        target = op.concat(
            [
                op.gather(size, ints([0]), ints(0)),
                ints([shape.kv_heads, repeats]),
                op.gather(size, ints([2]), ints(0)),
                ints([shape.head_dim]),
            ],
            0,
        )
        repeated = op.broadcast(op.unsqueeze(both, ints(2)), target, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(repeated, ints([0, shape.heads, -1, shape.head_dim]), True)

    def norm(self, x: ov.Node, weight: str) -> ov.Node:
        square = op.power(x, op.constant(2.0, np.float32))
        mean = op.reduce_mean(square, ints([-1]), True)
        root = op.sqrt(op.add(mean, op.constant(self.shape.eps, np.float32)))
        scaled = op.multiply(x, op.divide(op.constant(1.0, np.float32), root))
        return op.multiply(scaled, op.constant(self.checkpoint.floats(weight), np.float32))

    def linear(self, x: ov.Node, weight: str, fmt: str | None = None) -> ov.Node:
        fmt = fmt or self.fmt
        if fmt == "bf16":
            bits = self.checkpoint.bits(weight)
            self.nbytes += bits.nbytes
            matrix = op.convert(self.constant(bits, ov.Type.bf16), "f32")
        elif fmt == "int8":
            matrix = self._int8(self.checkpoint.floats(weight))
        else:
            matrix = self._int4(self.checkpoint.floats(weight))
        return op.matmul(x, matrix, False, True)

    def _int8(self, w: np.ndarray) -> ov.Node:
        scale = np.maximum(np.abs(w).max(1, keepdims=True) / 127, 1e-8).astype(np.float16)
        codes = np.rint(w / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
        self.nbytes += codes.nbytes + scale.nbytes
        floats = op.convert(self.constant(codes, ov.Type.i8), "f16")
        return op.convert(op.multiply(floats, self.constant(scale, ov.Type.f16)), "f32")

    def _int4(self, w: np.ndarray) -> ov.Node:
        groups = w.reshape(len(w), -1, GROUP)
        # The element of the largest magnitude becomes -8, so that all 16 codes are used.
        at = np.abs(groups).argmax(2, keepdims=True)
        scale = np.take_along_axis(groups, at, 2) / -8
        scale = np.where(scale == 0, 1e-8, scale).astype(np.float16)
        codes = np.rint(groups / scale.astype(np.float32)).clip(-8, 7).astype(np.int8) & 15
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
        self.nbytes += packed.nbytes + scale.nbytes
        floats = op.convert(self.constant(packed, ov.Type.i4, list(groups.shape)), "f16")
        scaled = op.multiply(floats, self.constant(scale, ov.Type.f16))
        return op.convert(op.reshape(scaled, ints(list(w.shape)), False), "f32")

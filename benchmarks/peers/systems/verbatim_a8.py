"""Verbatim with activations in 8 bits, as in OpenVINO and llama.cpp with quantized weights."""

from __future__ import annotations

from benchmarks.peers.protocol import serve
from benchmarks.peers.systems.verbatim import Verbatim


class VerbatimA8(Verbatim):
    activation_bits = 8


if __name__ == "__main__":
    serve(VerbatimA8())

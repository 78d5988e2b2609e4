"""Verbatim beside transformers, llama.cpp and OpenVINO, on the same weights, in one run.

    python -m benchmarks.peers.setup     # once: the peers in an environment of their own
    python -m benchmarks.peers [--shape moe] [--quick] [--json FILE] [--markdown FILE]

Each system is a process of its own, and they take turns: while one is timed, the others are stopped.
So the driver imports neither torch nor a peer: `systems/` does, in the workers. `gguf_file` and
`openvino_graph` turn the weights, one folder of random bf16, into the peers' own formats.

What is fair: prompts of equal length, so that nobody needs a scheduler; the same number of threads; K and V
of 16 bits, or with `--kv int8` of 8, in all systems; the head of int4 models in 8 bits in all systems. Whole
steps are timed, from ids to next ids. Behind a long prompt the rows' K and V are copies of one row's, each in
memory of its own, since computing them would take most of the time. The rows go on from different ids, so
that those of a mixture of experts choose different experts. Each system's logits are compared with
transformers' before it is measured.
"""

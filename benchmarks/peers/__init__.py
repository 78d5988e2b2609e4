"""Verbatim beside transformers, llama.cpp and OpenVINO, on the same weights, in one run.

    python -m benchmarks.peers.setup     # once: the peers in an environment of their own
    python -m benchmarks.peers [--shape moe] [--quick] [--json FILE] [--markdown FILE]

Each system runs in its own process, and they take turns: while one is timed, the others are stopped. The
driver imports neither torch nor a peer; the workers in `systems/` do. `gguf_file` and `openvino_graph`
convert the weights, one folder of random bf16, to the peers' formats.

To be fair, all systems have prompts of equal length, so that none needs a scheduler; the same number of
threads; K and V of 16 bits, or of 8 with `--kv int8`; and int4 models with a head of 8 bits. Whole steps are
timed, from ids to next ids. After a long prompt, the rows' K and V are copies of one row's, each in its own
memory, since computing them would take most of the time. The rows continue with different ids, so that they
choose different experts in a mixture of experts. Each system's logits are compared with transformers' before
it is measured.
"""

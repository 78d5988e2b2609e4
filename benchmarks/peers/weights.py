"""Write the random weights that every system reads: `python -m benchmarks.peers.weights FOLDER`."""

from __future__ import annotations

import argparse
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {},
    "toy": dict(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    ),
}


def main() -> None:
    import torch

    from benchmarks.decode import make_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    changes = dict(SHAPES[options.shape])
    if options.layers is not None:
        changes["num_hidden_layers"] = options.layers
    make_model(torch.bfloat16, **changes).save_pretrained(options.folder)


if __name__ == "__main__":
    main()

"""Quantization: the named formats of weights and of K/V, and conversions to and from their bytes.

`formats.py` has the formats that a caller can choose, by name, and `kernels/packing.py` the byte layouts.
Numbers become bytes in `rows.py` (groups), `blocks.py` (blocks of 256) and `matrix.py` (whole weights).
`integers.py` defines products with 8-bit activations, and `report.py` is the part of `LLM.info` about
quantized weights. Layers with quantized weights are in `model/quantized.py`, and formats of checkpoints in
`weights/formats/`.
"""

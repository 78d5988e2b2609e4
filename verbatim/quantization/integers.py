"""Integer products of quantized weights and 8-bit activations.

In each group along K, a row x has the scale `xs = max|x| / 127` and the codes `round(x * (127 / max|x|))`,
rounded to even, in float32. A group with a maximum below 2^-100 is zero; NaN or infinity makes the row NaN.
A weight is `low + scale * code` (`rows.py`), so a group contributes

    xs * (scale * D + low * S)        D: the sum of both codes' products, S: of the activations' codes

in float32, each step rounded; contributions are added in the order of the groups, then the bias, and the sum
is rounded to the model's dtype. D and S are integers below 2^24, so they are exact in any order of
additions: `kernels/integer*` and the torch code below are bit-identical on every machine.

The matrix is interleaved: `[blocks, words, 32]` of int32, with blocks of 32 columns of the product (rows of
the matrix), padded with zeros. A column's words are, for each group, its (scale, low), then its codes: four
8-bit codes per word, or eight 4-bit codes, the later four in the upper halves of the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.quantization.matrix import QuantizedMatrix, plain_rows
from verbatim.quantization.rows import split

_SMALLEST = 2.0**-100


def activation_codes(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows `[R, K]`: `(codes, xs, S)`, all float32: `[R, K]`, and `[R, groups]` twice."""
    codes, scales, sums = [], [], []
    for part in x.float().split(group, 1):
        peak = part.abs().amax(1, keepdim=True)
        limit = torch.full_like(peak, 127.0)  # a tensor, as torch computes number / x as a product
        fit = (peak >= _SMALLEST) & (peak < torch.inf)
        code = torch.where(fit, (part * (limit / peak)).round(), 0.0)
        scales.append(torch.where(fit, peak / limit, torch.where(peak < 1, 0.0, torch.nan)))
        codes.append(code)
        sums.append(code.sum(1, keepdim=True))
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(sums, 1)


def integer_linear(
    x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, float32: bool
) -> Tensor:
    """Compute the product in torch, as slow reference: `[..., K]` to `[..., N]` in x's dtype or float32."""
    (width, depth), group = weight.shape, weight.packing.rows.group
    codes, scales, sums = activation_codes(x.reshape(-1, depth), group)
    packed = plain_rows(weight.data, weight.packing)
    weights, heads = split(packed, depth, weight.packing.rows)
    weights = weights.to(x.device, torch.float32)
    heads = heads[..., None].view(torch.bfloat16).to(x.device).float()
    out = torch.zeros(len(codes), width, device=x.device)
    for g in range(heads.shape[1]):
        at = slice(g * group, (g + 1) * group)
        dots = codes[:, at].double() @ weights[:, at].double().t()
        part = heads[:, g, 0] * dots.float() + heads[:, g, 1] * sums[:, g : g + 1]
        out += scales[:, g : g + 1] * part
    if bias is not None:
        out += bias.float()
    return (out if float32 else out.to(x.dtype)).view(*x.shape[:-1], width)

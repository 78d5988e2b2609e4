"""Integer products: quantized weights with activations of 8 bits.

For a row x and a weight's group of K: `xs = max|x| / 127` and the codes `round(x * (127 / max|x|))`, to even,
in float32. A group with a maximum below 2^-100 is zero; one with a NaN or an infinity makes its row NaN. A
weight is `low + scale * code` (`kernels/packed_rows.py`), so a group contributes

    xs * (scale * D + low * S)        D: the sum of both codes' products, S: of the activations' codes

in float32, each step rounded; contributions are added in the order of the groups, then the bias, and the sum
is rounded to the model's dtype. D and S are integers below 2^24, so they are exact in any order of
additions: `kernels/integer*` and the torch code below are bit-identical on every machine.

Such a matrix is interleaved: `[blocks, words, 32]` of int32, with blocks of 32 columns of the product (rows
of the matrix), padded with zeros. A column's words are, group by group, its (scale, low), then its codes:
with 8 bits four neighbours per word; with 4 bits eight, the later four in the upper halves of the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verbatim.model.quantize import plain_rows
from verbatim.model.weight_packing import WeightPacking

_SMALLEST = 2.0**-100


def activation_codes(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows `[R, K]`: `(codes, xs, S)`, all float32: `[R, K]`, and `[R, groups]` twice."""
    codes, scales, sums = [], [], []
    for part in x.float().split(group, 1):
        peak = part.abs().amax(1, keepdim=True)
        most = torch.full_like(peak, 127.0)  # a tensor: torch computes number / x as a product
        fit = (peak >= _SMALLEST) & (peak < torch.inf)
        code = torch.where(fit, (part * (most / peak)).round(), 0.0)
        scales.append(torch.where(fit, peak / most, torch.where(peak < 1, 0.0, torch.nan)))
        codes.append(code)
        sums.append(code.sum(1, keepdim=True))
    return torch.cat(codes, 1), torch.cat(scales, 1), torch.cat(sums, 1)


def integer_linear(
    x: Tensor, data: Tensor, packing: WeightPacking, bias: Tensor | None, float32: bool
) -> Tensor:
    """Compute the product in torch, slowly: `[..., N]` of x `[..., K]`, in x's dtype or in float32."""
    group = packing.quantization.group_size
    rows = x.reshape(-1, packing.depth)
    codes, scales, sums = activation_codes(rows, group)
    weights, heads = packing.split(plain_rows(data, packing))
    weights = weights.to(x.device, torch.float32)
    heads = heads[..., None].view(torch.bfloat16).to(x.device).float()
    out = torch.zeros(len(rows), packing.width, device=x.device)
    for g in range(heads.shape[1]):
        at = slice(g * group, (g + 1) * group)
        dots = codes[:, at].double() @ weights[:, at].double().t()
        part = heads[:, g, 0] * dots.float() + heads[:, g, 1] * sums[:, g : g + 1]
        out += scales[:, g : g + 1] * part
    if bias is not None:
        out += bias.float()
    return (out if float32 else out.to(x.dtype)).view(*x.shape[:-1], packing.width)

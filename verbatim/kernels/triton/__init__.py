"""The GPU kernels in Triton: attention over blocks, products, norms, rotary embeddings, draws.

Imported only when something has to run on a GPU, or when `VERBATIM_KERNELS=triton` asks for these
kernels on the CPU under Triton's interpreter (`TRITON_INTERPRET=1`), which is how they are checked
where there is no GPU. Every kernel has a reference in plain torch beside it or in the room it serves.
"""

from __future__ import annotations

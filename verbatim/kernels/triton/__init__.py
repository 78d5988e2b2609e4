"""The GPU kernels in Triton: attention over blocks, products, norms, rotary embeddings, draws.

Imported only if something has to run on a GPU, or if `VERBATIM_KERNELS=triton` selects these kernels on
the CPU under Triton's interpreter (`TRITON_INTERPRET=1`), which is how they are tested without a GPU.
Every kernel has a reference in plain torch, in its own module or in the module that calls it.
"""

from __future__ import annotations

"""FlexLLMGen's `OptLM` with its `Policy`, on Verbatim's engine.

`docs/coming-from/flexllmgen.md` says what differs.
"""

from verbatim.compat.flexllmgen.config import OptConfig, get_opt_config
from verbatim.compat.flexllmgen.model import OptLM
from verbatim.compat.flexllmgen.policy import CompressionConfig, ExecutionEnv, Policy

__all__ = [
    "CompressionConfig",
    "ExecutionEnv",
    "OptConfig",
    "OptLM",
    "Policy",
    "get_opt_config",
]

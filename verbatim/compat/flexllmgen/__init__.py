"""FlexLLMGen's `OptLM` with its `Policy` on Verbatim's engine; see docs/coming-from/flexllmgen.md."""

from verbatim.compat.flexllmgen.benchmark import (
    Task,
    add_parser_arguments,
    run_flexllmgen,
    str2bool,
)
from verbatim.compat.flexllmgen.config import OptConfig, get_opt_config
from verbatim.compat.flexllmgen.model import OptLM
from verbatim.compat.flexllmgen.policy import (
    CompressionConfig,
    ExecutionEnv,
    Policy,
    TorchDevice,
    TorchDisk,
    TorchMixedDevice,
)

__all__ = [
    "CompressionConfig",
    "ExecutionEnv",
    "OptConfig",
    "OptLM",
    "Policy",
    "Task",
    "TorchDevice",
    "TorchDisk",
    "TorchMixedDevice",
    "add_parser_arguments",
    "get_opt_config",
    "run_flexllmgen",
    "str2bool",
]

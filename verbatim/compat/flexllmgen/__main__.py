"""`python -m verbatim.compat.flexllmgen`: FlexLLMGen's benchmark."""

from __future__ import annotations

import argparse
import sys

from verbatim.cli.terminal import exit_status
from verbatim.compat.flexllmgen.benchmark import add_parser_arguments, run_flexllmgen

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m verbatim.compat.flexllmgen")
    add_parser_arguments(parser)
    sys.exit(exit_status(run_flexllmgen, parser.parse_args()))

"""A progress bar over the requests of one call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from verbatim.common.checks import switch
from verbatim.core import FinishReason, Request

_DELAY_S = 1.0  # time before the bar appears, so that short calls show none


@contextmanager
def progress_bar(requests: list[Request], shown: bool | None) -> Iterator[None]:
    """Show on stderr how many requests have ended during the block, with the rate of new tokens.

    Args:
        shown: whether to show the bar. None: for several requests, on a terminal, after one second.

    Raises:
        InvalidRequest: `shown` is not a bool or None.
    """
    delay_s = _DELAY_S if shown is None else 0.0
    if shown is None:
        shown = len(requests) > 1 and sys.stderr is not None and sys.stderr.isatty()
    if not switch("progress", shown):
        yield
        return
    from tqdm import tqdm

    num_tokens = 0

    def advance(request: Request) -> None:  # in the thread that runs the steps, one call at a time
        nonlocal num_tokens
        outputs = [] if request.result is None else request.result.outputs
        if not outputs or any(o.finish_reason is FinishReason.ABORT for o in outputs):
            return
        num_tokens += sum(len(output.token_ids) for output in outputs)
        seconds = bar.format_dict["elapsed"]
        if num_tokens and seconds:
            bar.set_postfix_str(f"{num_tokens / seconds:.0f} tokens/s", refresh=False)
        bar.update()

    with tqdm(total=len(requests), unit="prompt", delay=delay_s, file=sys.stderr) as bar:
        for request in requests:
            request.on_end = partial(advance, request)
        yield

"""`WeightReceiver`: a server's end of a trainer's process group, in a process of its own.

gloo ends its process where the peer sends other sizes than announced, so it must not run in the server's.

`python -m verbatim.rl.receiver HOST PORT RANK SIZE TIMEOUT_S` joins the group. Each line of its stdin is a
list of sizes in bytes; it writes that many tensors to stdout. In front of each one, and once after it has
joined, is a byte 0. A byte 1 and a text are an error, which ends it. It ends at any time if its stdin does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from io import BufferedReader
from queue import SimpleQueue
from typing import cast

import torch
from torch import Tensor

from verbatim.errors import VerbatimError, first_line
from verbatim.placement.distributed.launcher import worker_environment
from verbatim.rl.transfer import TIMEOUT_S, WeightGroup

_OK, _ERROR = b"\0", b"\1"
_END_S = 10.0  # for a process that has closed its stdout to end


class WeightReceiver:
    """Receives the tensors that rank 0 of a process group broadcasts.

    After an error it is of no further use, as the ranks disagree.

    Args:
        host, port, rank, size, timeout_s: as of `WeightGroup`.

    Raises:
        VerbatimError: the others did not come.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        given = map(str, (host, port, rank, size, timeout_s))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
            start_new_session=True,  # Ctrl-C is for this process only
        )
        assert self._process.stdin is not None
        self._orders = self._process.stdin
        self._answers = cast(BufferedReader, self._process.stdout)
        self._end = weakref.finalize(self, _end, self._process)
        self._expect_ok()

    def receive(self, shapes: Sequence[tuple[torch.dtype, list[int]]]) -> list[Tensor]:
        """Return the tensors that rank 0 broadcasts next.

        Raises:
            VerbatimError: the trainer ended, sent other sizes, or nothing within `timeout_s`; or there is
                no memory for the tensors.
        """
        try:
            tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]
        except RuntimeError as error:
            raise VerbatimError(f"no memory for the new weights: {first_line(error)}") from None
        pieces = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        try:
            order = json.dumps([len(piece) for piece in pieces])
            self._orders.write(order.encode() + b"\n")
            self._orders.flush()
        except OSError:
            self._expect_ok()
        for piece in pieces:
            self._expect_ok()
            if self._answers.readinto(piece.numpy().data) < len(piece):
                self._fail()
        return tensors

    def close(self) -> None:
        """Leave the group; a call in progress fails."""
        self._end()

    def _expect_ok(self) -> None:
        if self._answers.read(1) != _OK:
            self._fail()

    def _fail(self) -> None:
        text = self._answers.read().decode(errors="replace")
        if not self._end.alive:
            raise VerbatimError("the process group was left")
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = 0
        self.close()
        if not text and code == -signal.SIGABRT:  # gloo's end
            text = "the process group broke down: the trainer sent other sizes than it announced"
        ended = f"signal {-code}" if code < 0 else f"exit status {code}"
        if code == -signal.SIGKILL:
            ended += ", as the system sends it where memory runs out"
        raise VerbatimError(text or f"the process that receives new weights has ended: {ended}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """Serve a `WeightReceiver`."""
    host, port, rank, size, timeout_s = sys.argv[1:]
    out = sys.stdout.buffer
    orders: SimpleQueue[str] = SimpleQueue()

    def read_orders() -> None:
        for line in sys.stdin:
            orders.put(line)
        os._exit(0)  # the server has ended, or needs the group no more

    threading.Thread(target=read_orders, daemon=True).start()
    try:
        group = WeightGroup(host, int(port), int(rank), int(size), float(timeout_s))
        out.write(_OK)
        out.flush()
        while True:
            for count in json.loads(orders.get()):
                tensor = group.receive(count)
                out.write(_OK)
                out.write(tensor.numpy().data)
                out.flush()
    except (VerbatimError, RuntimeError) as error:  # torch's, where there is no memory
        out.write(_ERROR + first_line(error).encode())
    except BrokenPipeError as error:  # the server has ended
        sys.exit(first_line(error))


if __name__ == "__main__":
    main()

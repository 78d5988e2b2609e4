"""What sessions keep of their conversations between two turns: K and V, and room for what is to come."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from verbatim.core import Holding, Sequence
from verbatim.errors import EngineClosed, OutOfBlocks
from verbatim.kv.blocks import BlockPool


class Sessions:
    """The holdings of all open sessions, in one pool.

    Blocks are taken and given back by whoever sits at the engine. Room is only a number: all sessions
    together never reserve more than the pool has, so each of them can come to its `max_length`. It is
    reserved and given back from any thread, also by the garbage collector.

    K and V of idle sessions are there to save time. Whoever runs may have their blocks: of the session
    that was not used for longest, the last ones first. What is lost is computed again in its next turn.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_dropped = 0  # blocks that idle sessions gave up to others
        self._idle: dict[Holding, None] = {}  # those that hold blocks; unused for longest first
        self._open: dict[Holding, None] = {}  # those that have room
        self._leaving: deque[Holding] = deque()  # whose blocks are to be given back
        self._waiting: dict[Callable[[], None], None] = {}  # to be told when room is given back
        self._closed = False
        self._lock = threading.RLock()  # of `_open` and the room; the collector may come in between

    # ---- room: from any thread

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_reserved(self) -> int:
        """Blocks that are reserved by all."""
        with self._lock:
            # A copy: the collector may close a session at any moment, also in the middle of the sum.
            return sum(holding.num_reserved for holding in list(self._open))

    @property
    def has_leavers(self) -> bool:
        """Is there anybody whose blocks `settle` would give back?"""
        return bool(self._leaving)

    def begin(
        self, holding: Holding, wait_s: float | None, wake: Callable[[], None]
    ) -> Iterator[float | None]:
        """Reserve room for a holding, unless it has some, and take it into use.

        Yields how many seconds to wait, None for as long as it takes, until `wake` is called; while it
        yields there is no room.

        Args:
            wait_s: how long to wait at most; None sets no limit.

        Raises:
            OutOfBlocks: there was no room in all that time.
            EngineClosed: the engine is closed, or the session.
        """
        give_up = math.inf if wait_s is None else time.monotonic() + wait_s
        try:
            while True:
                now = time.monotonic()
                with self._lock:
                    if self._closed:
                        raise EngineClosed("this LLM has been closed")
                    if holding.closed:
                        raise EngineClosed("this session has been closed")
                    if self._reserve(holding, now):
                        holding.in_use = True
                        return
                    self._waiting[wake] = None
                    next_look = min([give_up, *map(_deadline, list(self._open))])
                if now >= give_up:
                    raise OutOfBlocks(self._no_room(holding, wait_s))
                yield None if next_look == math.inf else max(1e-3, next_look - now)
        finally:
            self._waiting.pop(wake, None)

    def _reserve(self, holding: Holding, now: float) -> bool:
        needed = -(-holding.max_length // self.block_size)
        if not holding.num_reserved:
            for other in list(self._open):
                if _deadline(other) <= now:
                    self._forget(other)
            if self.num_reserved + needed > self.pool.num_blocks - 1:
                return False
        holding.num_reserved = needed
        self._open[holding] = None
        return True

    def end(self, holding: Holding) -> None:
        """A turn is over."""
        holding.last_used = time.monotonic()
        holding.in_use = False
        if holding.idle_timeout_s is not None:
            self._wake_all()  # those who wait know when to look again

    def leave(self, holding: Holding) -> None:
        """A session ends; its blocks go back at the next step, or whenever somebody settles."""
        with self._lock:
            holding.closed = True
            self._forget(holding)

    def _forget(self, holding: Holding) -> None:
        self._open.pop(holding, None)
        holding.num_reserved = 0
        self._leaving.append(holding)
        self._wake_all()

    def _wake_all(self) -> None:
        for wake in list(self._waiting):
            with suppress(RuntimeError):  # its event loop was closed; nobody waits there
                wake()

    def _no_room(self, holding: Holding, wait_s: float | None) -> str:
        size, total = self.block_size, self.pool.num_blocks - 1
        return (
            f"a session of max_length={holding.max_length} needs {-(-holding.max_length // size)} blocks of "
            f"{size} tokens; {self.num_reserved} of the {total} that kv_memory holds are reserved by "
            f"{self.num_open} open sessions, and none of them ended within wait_s={wait_s:g}"
        )

    # ---- blocks: for whoever sits at the engine

    def settle(self) -> None:
        """Give back the blocks of sessions that have ended, or were unused for too long."""
        now = time.monotonic()
        with self._lock:
            for holding in list(self._open):
                if _deadline(holding) <= now:
                    self._forget(holding)
        while self._leaving:
            holding = self._leaving[0]
            if holding.closed or not holding.in_use:
                self._drop(holding)
            self._leaving.popleft()

    def hand_over(self, sequence: Sequence) -> None:
        """A turn begins: its sequence gets what is held of its tokens."""
        holding, request = sequence.request.holding, sequence.request
        if holding is None:
            return
        holding.turn = sequence
        kept = num_in_common(holding.token_ids, sequence.token_ids(0, len(holding.token_ids)))
        kept = min(kept, sequence.num_tokens - 1)
        if sequence.unread_prompt_row is not None:
            kept = min(kept, sequence.unread_prompt_row)
        if request.params.replay_routing is not None:
            kept = 0  # K and V are to be what the routing makes of them
        self.pool.give_back(holding.cut(kept, self.block_size))
        if kept % self.block_size and not self.pool.is_shared(holding.blocks[-1]):
            self.pool.forget_block(holding.blocks[-1])  # it will be written to
        sequence.blocks, holding.blocks = holding.blocks, []
        sequence.num_computed = kept
        sequence.num_remembered = holding.num_remembered
        sequence.num_draft_computed = holding.num_draft_computed.copy()
        holding.is_private = holding.is_private and kept > 0
        self._empty(holding)

    def keep(self, sequence: Sequence) -> None:
        """A turn has ended: take over the blocks of its sequence, which are then the session's."""
        holding = sequence.request.holding
        if holding is None or holding.turn is not sequence:
            return
        holding.turn = None
        if (
            holding.closed
            or not sequence.blocks
            or sequence.request.params.replay_routing is not None
        ):
            return  # K and V are not what the ids alone would give, or nobody wants them
        holding.token_ids = sequence.token_ids(0, sequence.num_computed)
        holding.blocks, sequence.blocks = sequence.blocks, []
        holding.num_remembered = sequence.num_remembered
        holding.num_draft_computed = sequence.num_draft_computed.copy()
        self.pool.give_back(holding.cut(sequence.num_computed, self.block_size))
        if holding.blocks:
            self._idle[holding] = None

    def put(self, holding: Holding, token_ids: list[int], blocks: list[int]) -> None:
        """Let a session hold blocks that were filled with K and V of these tokens from elsewhere."""
        assert not holding.blocks
        holding.token_ids, holding.blocks, holding.is_private = token_ids, blocks, True
        self._idle[holding] = None

    def free_block(self) -> bool:
        """Take a block from the session that was idle for longest; False where none holds any."""
        holding = next(iter(self._idle), None)
        if holding is None:
            return False
        kept = (len(holding.blocks) - 1) * self.block_size
        self.pool.give_back(holding.cut(kept, self.block_size))
        self.num_dropped += 1
        if not holding.blocks:
            self._empty(holding)
        return True

    def drop_kv(self) -> None:
        """Give back all blocks of idle sessions; they stay open."""
        for holding in list(self._idle):
            self._drop(holding)

    def forget_keys(self) -> None:
        """Nobody is to find any more what was computed until now."""
        for holding in self._idle:
            holding.is_private = True

    def idle(self) -> list[Holding]:
        """Those that hold blocks while nothing is done for them."""
        return list(self._idle)

    def close(self) -> None:
        """Let nobody begin any more."""
        self._closed = True
        self._wake_all()

    def forked(self) -> None:
        """In the child of a fork: whoever held the lock does not exist."""
        self._lock = threading.RLock()

    def _drop(self, holding: Holding) -> None:
        self.pool.give_back(holding.cut(0, self.block_size))
        self._empty(holding)

    def _empty(self, holding: Holding) -> None:
        """It holds no block."""
        holding.token_ids, holding.num_remembered = [], 0
        holding.num_draft_computed = {}
        self._idle.pop(holding, None)


def _deadline(holding: Holding) -> float:
    """When it loses its room."""
    if holding.in_use or holding.idle_timeout_s is None:
        return math.inf
    return holding.last_used + holding.idle_timeout_s


def num_in_common(ids: list[int], others: list[int]) -> int:
    """With how many ids both begin."""
    shorter = min(len(ids), len(others))
    if ids[:shorter] == others[:shorter]:
        return shorter
    return next(i for i in range(shorter) if ids[i] != others[i])

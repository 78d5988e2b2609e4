"""KV cache that sessions keep between two turns, and the blocks reserved for their growth."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

from verbatim.core import Sequence, SessionCache
from verbatim.errors import EngineClosed, OutOfBlocks
from verbatim.kv.blocks import BlockPool
from verbatim.kv.states import StateSlots

_POLL_S = 0.01  # between two attempts to reserve blocks


class Sessions:
    """The caches of all open sessions, in one block pool.

    Blocks are allocated and freed only under the engine lock. A reservation is only a number: all
    sessions together never reserve more blocks than the pool has, so each can grow to its `max_length`.
    Reservations are made and returned from any thread, also by the garbage collector.

    The KV of idle sessions only saves time. Running requests may reclaim its blocks: those of the least
    recently used session first, from its last block back. Its next turn recomputes what was reclaimed.
    """

    def __init__(self, pool: BlockPool, states: StateSlots, block_size: int) -> None:
        self.pool = pool
        self.states = states
        self.block_size = block_size
        self._idle: dict[SessionCache, None] = {}  # with blocks, least recently used first
        self._open: dict[SessionCache, None] = {}  # with a reservation
        self._closed = False
        # Guards `_open` and the reservations. Reentrant: the garbage collector may close a session
        # while this thread holds it.
        self._lock = threading.RLock()

    # ---- reservations: from any thread

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_reserved(self) -> int:
        """Number of blocks that all sessions reserve."""
        with self._lock:
            # A copy: the garbage collector may close a session in the middle of the sum.
            return sum(map(self._needed, list(self._open)))

    def _needed(self, cache: SessionCache) -> int:
        return -(-cache.max_length // self.block_size)

    def acquire(self, cache: SessionCache, wait_s: float | None) -> Iterator[float]:
        """Reserve blocks for a session, unless it has a reservation, and mark it in use.

        Yields the seconds to sleep until the next attempt. Returns once the reservation is made.

        Args:
            wait_s: how long to wait at most; None sets no limit.

        Raises:
            OutOfBlocks: no reservation was possible within `wait_s`.
            EngineClosed: the engine or the session is closed.
        """
        give_up = math.inf if wait_s is None else time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            with self._lock:
                self.check_open(cache)
                if self._reserve(cache, now):
                    cache.last_used = math.inf  # until `release`
                    return
            if now >= give_up:
                raise OutOfBlocks(self._no_blocks(cache, wait_s))
            yield _POLL_S

    def check_open(self, cache: SessionCache) -> None:
        """Raise EngineClosed if the engine or the session is closed."""
        if self._closed or cache.closed:
            raise EngineClosed(f"this {'LLM' if self._closed else 'session'} has been closed")

    def _reserve(self, cache: SessionCache, now: float) -> bool:
        if cache not in self._open:
            self._unreserve_idle(now)
            if self.num_reserved + self._needed(cache) > self.pool.num_blocks - 1:
                return False
        self._open[cache] = None
        return True

    def release(self, cache: SessionCache) -> None:
        """Mark a session idle at the end of a turn."""
        cache.last_used = time.monotonic()

    def close_session(self, cache: SessionCache) -> None:
        """Close a session; its blocks are freed at the next step or the next `reclaim`."""
        with self._lock:
            cache.closed = True
            self._open.pop(cache, None)

    def _unreserve_idle(self, now: float) -> None:
        """Take back the reservations of sessions that are idle for longer than their timeout."""
        for cache in list(self._open):
            if cache.idle_timeout_s is not None and cache.last_used + cache.idle_timeout_s <= now:
                self._open.pop(cache, None)

    def _no_blocks(self, cache: SessionCache, wait_s: float | None) -> str:
        size, total = self.block_size, self.pool.num_blocks - 1
        return (
            f"a session of max_length={cache.max_length} needs {self._needed(cache)} blocks of "
            f"{size} tokens; {self.num_reserved} of the {total} that kv_memory holds are reserved by "
            f"{self.num_open} open sessions, and none of them ended within wait_s={wait_s:g}"
        )

    # ---- blocks: under the engine lock

    def reclaim(self) -> None:
        """Free the blocks of sessions that are closed, or idle for longer than their timeout."""
        with self._lock:
            self._unreserve_idle(time.monotonic())
        for cache in [cache for cache in self._idle if cache not in self._open]:
            self._cut(cache, 0)

    def attach(self, sequence: Sequence) -> None:
        """Move the cached blocks of a session to the sequence of its new turn, up to their common prefix."""
        cache, request = sequence.request.session_cache, sequence.request
        if cache is None:
            return
        cache.turn = sequence
        kept = num_in_common(cache.token_ids, sequence.token_ids(0, len(cache.token_ids)))
        kept = min(kept, sequence.num_tokens - 1)
        if sequence.next_prompt_row is not None:
            kept = min(kept, sequence.next_prompt_row)
        if request.params.forces_choices or request.params.record_indices:
            kept = 0  # replayed choices change K and V; only rows that run are recorded
        if cache.adapter != request.adapter:
            kept = 0
        if self.states.enabled and kept not in cache.states:
            kept = 0  # the blocks are found again where a state is cached
        self._cut(cache, kept)
        if kept % self.block_size and not self.pool.is_shared(cache.blocks[-1]):
            self.pool.forget_block(cache.blocks[-1])  # the turn writes to it
        sequence.take_from(cache)
        cache.is_private = cache.is_private and kept > 0
        self._clear(cache)

    def save(self, sequence: Sequence) -> None:
        """Move the blocks of a finished turn's sequence to its session."""
        cache = sequence.request.session_cache
        if cache is None or cache.turn is not sequence:
            return
        cache.turn = None
        if (
            cache.closed
            or not sequence.blocks
            or sequence.request.params.forces_choices  # K and V differ from the ids' own
        ):
            return
        cache.take_from(sequence)
        cache.token_ids = sequence.token_ids(0, cache.num_computed)
        cache.adapter = sequence.request.adapter
        self._cut(cache, cache.num_computed)
        if cache.blocks:
            self._idle[cache] = None

    def load(self, cache: SessionCache, token_ids: list[int], blocks: list[int]) -> None:
        """Give a session blocks that were filled with the K and V of `token_ids` from a file."""
        assert not cache.blocks
        cache.token_ids, cache.blocks, cache.is_private = token_ids, blocks, True
        cache.num_computed = len(token_ids)
        self._idle[cache] = None

    def free_block(self) -> bool:
        """Free one block of the least recently used idle session; False if there is none."""
        cache = next(iter(self._idle), None)
        if cache is None:
            return False
        self._cut(cache, (len(cache.blocks) - 1) * self.block_size)
        return True

    def drop_kv(self) -> None:
        """Free all blocks of idle sessions; the sessions stay open."""
        for cache in list(self._idle):
            self._cut(cache, 0)

    def make_private(self) -> None:
        """Hide the present blocks of idle sessions from prefix lookups."""
        for cache in self._idle:
            cache.is_private = True

    def close(self) -> None:
        """Refuse new turns, and end all waits."""
        self._closed = True

    def after_fork(self) -> None:
        """Replace the lock in the child of a fork, where its holder does not exist."""
        self._lock = threading.RLock()

    def _cut(self, cache: SessionCache, num_tokens: int) -> None:
        """Free what a session keeps beyond its first tokens, and its state unless that belongs to them."""
        needed = -(-num_tokens // self.block_size)
        self.pool.give_back(cache.blocks[needed:])
        del cache.blocks[needed:], cache.token_ids[num_tokens:]
        cache.num_computed = len(cache.token_ids)
        cache.num_indexed = min(cache.num_indexed, cache.num_computed // self.block_size)
        cache.truncate_draft_cache(cache.num_computed)
        self.states.keep(cache, num_tokens)
        if not cache.blocks:
            self._clear(cache)

    def _clear(self, cache: SessionCache) -> None:
        """Reset a cache that holds no block."""
        cache.token_ids, cache.adapter = [], 0
        self._idle.pop(cache, None)


def num_in_common(ids: list[int], others: list[int]) -> int:
    """Return the length of the common prefix of two lists of ids."""
    shorter = min(len(ids), len(others))
    if ids[:shorter] == others[:shorter]:
        return shorter
    return next(i for i in range(shorter) if ids[i] != others[i])

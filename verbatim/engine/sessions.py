"""The KV caches that sessions keep between turns, and the blocks reserved for their growth."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

from verbatim.core import Sequence, SessionCache
from verbatim.errors import EngineClosed, OutOfBlocks
from verbatim.kv.blocks import BlockPool
from verbatim.kv.states import StateSlots
from verbatim.sampling.stopping import num_in_common

_POLL_S = 0.01  # time between two attempts to reserve blocks


class Sessions:
    """The caches of all open sessions, in one block pool.

    Blocks are allocated and freed only under the engine lock. A reservation is only a number: all
    sessions together never reserve more blocks than the pool has, so each can grow to its `max_length`.
    Any thread can make and release reservations; finalizers can release them.

    Running requests can reclaim the blocks of idle sessions: the least recently used session first, from
    its last block backwards. The session's next turn recomputes them.
    """

    def __init__(self, pool: BlockPool, states: StateSlots) -> None:
        self.pool = pool
        self.states = states
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
            return sum(self.pool.blocks_for(cache.max_length) for cache in list(self._open))

    def acquire(self, cache: SessionCache, wait_s: float | None) -> Iterator[float]:
        """Reserve blocks for a session, unless it has a reservation, and mark it as in use.

        Yields the seconds to sleep until the next attempt, for up to `wait_s` seconds (None: no limit), and
        returns once the reservation is made.

        Raises:
            OutOfBlocks: no reservation was possible within `wait_s`.
            EngineClosed: the engine or the session is closed.
        """
        deadline = math.inf if wait_s is None else time.monotonic() + wait_s
        needed, size = self.pool.blocks_for(cache.max_length), self.pool.block_size
        while True:
            now = time.monotonic()
            with self._lock:
                if self._closed or cache.closed:
                    raise EngineClosed(
                        f"this {'LLM' if self._closed else 'session'} has been closed"
                    )
                if cache not in self._open:
                    self._unreserve_idle(now)
                    if self.num_reserved + needed < self.pool.num_blocks:
                        self._open[cache] = None
                if cache in self._open:
                    cache.last_used = math.inf  # until `release`
                    return
            if now >= deadline:
                raise OutOfBlocks(
                    f"a session of max_length={cache.max_length} needs {needed} blocks of "
                    f"{size} tokens; {self.num_reserved} of the {self.pool.num_blocks - 1} that "
                    f"kv_memory holds are reserved by {self.num_open} open sessions, and none of them ended "
                    f"within wait_s={wait_s:g}"
                )
            yield _POLL_S

    def release(self, cache: SessionCache) -> None:
        """Mark a session idle at the end of a turn."""
        cache.last_used = time.monotonic()

    def close_session(self, cache: SessionCache) -> None:
        """Close a session; its blocks are freed at the next step or the next `reclaim`."""
        with self._lock:
            cache.closed = True
            self._open.pop(cache, None)

    def _unreserve_idle(self, now: float) -> None:
        """Cancel the reservations of sessions that have been idle for longer than their timeout."""
        for cache in list(self._open):
            if cache.idle_timeout_s is not None and cache.last_used + cache.idle_timeout_s <= now:
                self._open.pop(cache, None)

    # ---- blocks: under the engine lock

    def reclaim(self) -> None:
        """Free the blocks of sessions that are closed, or have been idle for longer than their timeout."""
        with self._lock:
            self._unreserve_idle(time.monotonic())
        for cache in [cache for cache in self._idle if cache not in self._open]:
            self._cut(cache, 0)

    def attach(self, sequence: Sequence) -> None:
        """Move a session's cached blocks to the sequence of its new turn, up to their common prefix."""
        cache, request = sequence.request.session_cache, sequence.request
        if cache is None:
            return
        cache.turn = sequence
        num_kept = num_in_common(cache.token_ids, sequence.token_ids(0, len(cache.token_ids)))
        num_kept = min(num_kept, sequence.num_tokens - 1)
        if sequence.next_prompt_row is not None:
            num_kept = min(num_kept, sequence.next_prompt_row)
        if request.params.forces_choices or request.params.record_indices:
            num_kept = 0  # replayed choices change K and V; only computed rows are recorded
        if cache.adapter != request.adapter:
            num_kept = 0
        if self.states.enabled and num_kept not in cache.states:
            num_kept = 0  # the prefix cache may have the blocks up to a cached state
        self._cut(cache, num_kept)
        sequence.take_from(cache)
        cache.is_private = cache.is_private and num_kept > 0
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
            or sequence.request.params.forces_choices  # K and V depend on the replayed choices
        ):
            return
        cache.take_from(sequence)
        cache.token_ids = sequence.token_ids(0, cache.num_computed)
        cache.adapter = sequence.request.adapter
        self._cut(cache, cache.num_computed)
        if cache.blocks:
            self._idle[cache] = None

    def load(self, cache: SessionCache, token_ids: list[int], blocks: list[int]) -> None:
        """Assign `blocks`, with the K and V of `token_ids` from a file, to a session."""
        assert not cache.blocks
        cache.token_ids, cache.blocks, cache.is_private = token_ids, blocks, True
        cache.num_computed = len(token_ids)
        self._idle[cache] = None

    def free_block(self) -> bool:
        """Free one block of the least recently used idle session; False if there is none."""
        cache = next(iter(self._idle), None)
        if cache is None:
            return False
        self._cut(cache, (len(cache.blocks) - 1) * self.pool.block_size)
        return True

    def drop_kv(self) -> None:
        """Free all blocks of idle sessions; the sessions stay open."""
        for cache in list(self._idle):
            self._cut(cache, 0)

    def make_private(self) -> None:
        """Keep the current blocks of idle sessions out of the prefix cache."""
        for cache in self._idle:
            cache.is_private = True

    def close(self) -> None:
        """Refuse new turns, and end the waits for reservations."""
        self._closed = True

    def after_fork(self) -> None:
        """Replace the lock in the child of a fork, where a thread that held it does not exist."""
        self._lock = threading.RLock()

    def _cut(self, cache: SessionCache, num_tokens: int) -> None:
        """Free the blocks after the first `num_tokens` tokens, and all states but the one at their end."""
        self.pool.resize(cache, num_tokens)
        del cache.token_ids[num_tokens:]
        cache.num_computed = len(cache.token_ids)
        cache.num_indexed = min(cache.num_indexed, cache.num_computed // self.pool.block_size)
        cache.truncate_draft_cache(cache.num_computed)
        self.states.keep_only(cache, num_tokens)
        if not cache.blocks:
            self._clear(cache)

    def _clear(self, cache: SessionCache) -> None:
        """Reset a cache that holds no block."""
        cache.token_ids, cache.adapter = [], 0
        self._idle.pop(cache, None)

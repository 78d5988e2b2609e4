"""Threads that read ahead and write behind: weights, experts, K and V."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

READERS = 2  # threads that read weights, or experts


class Job:
    """A read or a write.

    Waiting uses raw locks and simple queues, which Ctrl-C can't leave in an inconsistent state.

    Attributes:
        ended: whether it is done, or has failed.
        error: what `work` raised.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.ended = False
        self._running = threading.Lock()
        self._running.acquire()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the job, and keep the error that it raises."""
        try:
            self._work()
        except BaseException as error:  # raised by the thread that waits
            self.error = error
        self.ended = True
        self._running.release()

    def wait(self) -> None:
        """Wait until it has ended. Only one thread may wait."""
        if not self.ended:
            self._running.acquire()


class Prefetcher:
    """Threads that take jobs from one queue, in the order of submission.

    Args:
        name: of the threads.
        num_threads: 0 runs each job where it is submitted.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self.num_threads = num_threads
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, unless they run."""
        while len(self._threads) < self.num_threads:
            thread = threading.Thread(
                target=_work,
                args=[self._jobs],
                name=f"{self.name}-{len(self._threads)}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def submit(self, job: Job) -> None:
        """Queue a job; without threads, run it."""
        if self.num_threads:
            assert self._threads, f"{self.name} was not started"
            self._jobs.put(job)
        else:
            job.run()

    def finish(self) -> None:
        """Wait until all submitted jobs are done."""
        if self._threads:
            everyone = threading.Barrier(len(self._threads))  # passed when no thread runs a job
            last = [Job(everyone.wait) for _ in self._threads]
            for job in last:
                self._jobs.put(job)
            for job in last:
                job.wait()

    def stop(self) -> None:
        """End the threads after the submitted jobs; a second call does nothing."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may run in it
                thread.join()


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()

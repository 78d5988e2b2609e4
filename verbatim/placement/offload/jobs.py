"""A thread that does one thing after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue


class Job:
    """Something to do, once others are done.

    Waiting is left to raw locks and simple queues, which Ctrl-C can't leave half taken.

    Args:
        work: what to do.
        after: jobs that must have ended before. They were submitted earlier, or this one never ends.

    Attributes:
        ended: whether it was done, or failed.
        error: what `work`, or one of those before it, raised.
    """

    def __init__(self, work: Callable[[], None], after: Sequence[Job] = ()) -> None:
        self._work = work
        self._after = after
        self.ended = False
        self._running = threading.Lock()
        self._running.acquire()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the job, and keep the error that it raises."""
        try:
            for job in self._after:
                job.wait()
                self.error = self.error or job.error
            if self.error is None:
                self._work()
        except BaseException as error:  # for whoever waits
            self.error = error
        self._after = ()
        self.ended = True
        self._running.release()

    def wait(self) -> None:
        """Until it has ended. One thread may wait."""
        if not self.ended:
            self._running.acquire()


class Worker:
    """A thread that runs jobs in the order of submission.

    Args:
        name: of its thread.
        threaded: in a thread of its own, from `start` to `stop`; False does each job where it is submitted.
    """

    def __init__(self, name: str, threaded: bool) -> None:
        self.name = name
        self.threaded = threaded
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Be ready for jobs."""
        if self.threaded and self._thread is None:
            self._jobs = SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=[self._jobs], name=self.name, daemon=True
            )
            self._thread.start()

    def submit(self, job: Job) -> None:
        """Let `job` be done after all those before it."""
        if self.threaded:
            assert self._thread is not None, f"{self.name} was not started"
            self._jobs.put(job)
        else:
            job.run()

    def finish(self) -> None:
        """Wait until everything that was submitted is done."""
        if self._thread is not None:
            last = Job(lambda: None)
            self._jobs.put(last)
            last.wait()

    def stop(self) -> None:
        """End the thread, behind what was submitted. Again does nothing."""
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():  # whoever collects garbage
                self._thread.join()
            self._thread = None


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()

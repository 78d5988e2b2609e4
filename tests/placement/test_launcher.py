"""The interpreter that forks workers."""

from __future__ import annotations

from verbatim.placement.distributed.launcher import Launcher


def test_workers_that_end_together_end_no_other() -> None:
    """The signal of one may come while another is reaped, and end the launcher with all that it started."""
    launcher = Launcher("builtins:dict")
    try:
        for _ in range(3):
            workers = [launcher.start() for _ in range(40)]
            assert all(worker.wait(30.0) for worker in workers)
            assert {worker.ended for worker in workers} == {"exit status 0"}
    finally:
        launcher.close()

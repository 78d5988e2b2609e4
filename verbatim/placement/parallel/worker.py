"""A process that rank 0 has started: `python -m verbatim.placement.parallel.worker`, its place on stdin."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Serve until rank 0 is done, or gone."""
    rank, port, key = sys.stdin.readline().split()
    from verbatim.placement.cluster.link import LinkLost, connect
    from verbatim.placement.parallel.crew import HOST
    from verbatim.placement.parallel.member import Member

    status = 0
    try:
        link = connect((HOST, int(port)), bytes.fromhex(key), {"rank": int(rank)})
        link.receive()  # welcome
        Member(link, int(rank)).serve("close")
    except LinkLost:
        pass  # rank 0 is gone
    except BaseException:
        status = 1  # rank 0 was told why
    # Nothing here is worth the seconds that an orderly end of torch and gloo takes.
    os._exit(status)


if __name__ == "__main__":
    main()

"""One module a system: `python -m benchmarks.peers.systems.NAME` answers commands until its input ends."""

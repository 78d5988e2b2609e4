"""One module per system: `python -m benchmarks.peers.systems.NAME` answers commands until its input ends."""

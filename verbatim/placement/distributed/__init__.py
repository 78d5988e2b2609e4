"""One model in several processes, on one machine or more, bit-identical to one process."""

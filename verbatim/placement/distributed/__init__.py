"""One model over several processes, of one machine or more, bit-equal to one process."""

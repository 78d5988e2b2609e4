"""One model over several processes of one machine, bit-equal to one process."""

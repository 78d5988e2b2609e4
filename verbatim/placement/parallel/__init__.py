"""One model over several processes of one machine, without a bit of difference."""

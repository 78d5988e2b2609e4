"""A model over several processes and machines: each runs some of its layers."""

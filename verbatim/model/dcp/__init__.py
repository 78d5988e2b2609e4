"""Checkpoints of torch.distributed.checkpoint (DCP): found, read without trust, and put into a module."""

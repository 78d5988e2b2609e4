"""Checkpoints of torch.distributed.checkpoint (DCP), read without executing pickled code."""

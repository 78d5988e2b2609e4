"""Checkpoints that KempnerForge trained: its config, and its models as transformers architectures."""

"""KempnerForge's checkpoints: its config, and its models as transformers architectures."""

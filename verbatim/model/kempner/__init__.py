"""KempnerForge's configs, checkpoints and live modules, run as transformers architectures."""

"""transformers modules: loading, inspection, and forwards on flat batches."""

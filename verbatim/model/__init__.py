"""Models: transformers modules opened, looked at, and run on flat batches."""

"""The KV cache: tensors, block allocation, prefix cache and attention."""

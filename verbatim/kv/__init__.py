"""Keys and values: the tensors that hold them and who owns which block."""

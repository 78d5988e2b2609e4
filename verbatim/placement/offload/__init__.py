"""A model larger than its memory: weights, K and V and activations over device, RAM and disk."""

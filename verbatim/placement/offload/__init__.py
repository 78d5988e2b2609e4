"""Offloading: weights, K and V and activations of a model in device memory, RAM and on the disk."""

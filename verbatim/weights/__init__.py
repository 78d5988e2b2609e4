"""Weights: lazy weights of any checkpoint format, reading and quantizing them."""

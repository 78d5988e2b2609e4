"""Lazy weights of any checkpoint format: reading, quantizing, caching and updating them."""

"""Adapters: the documented calls of other systems, on Verbatim's engine.

An adapter translates arguments and results. It has no loop over tokens and never calls a model; a test
holds it to that.
"""

"""Placements: runners for a model in memory, on disk, or in several processes."""

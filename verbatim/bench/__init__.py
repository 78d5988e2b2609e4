"""Rooms of `verbatim bench`: how fast a model runs here, beside other systems and the machine's limits."""

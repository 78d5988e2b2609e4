"""`verbatim bench`: speed of a model, compared with other systems and the machine's limits."""

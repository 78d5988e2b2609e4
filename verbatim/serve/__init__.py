"""Rooms of `verbatim serve`: OpenAI's endpoints, our own, and what keeps a server up.

Needs the extra `serve` (`pip install 'verbatim[serve]'`); nothing else in the house imports this.
"""

"""`verbatim serve`: OpenAI's endpoints, Verbatim's own, and the protection of the server.

Needs the extra `serve` (`pip install '.[serve]'`); the rest of the package does not import it.
"""

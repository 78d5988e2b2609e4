"""`verbatim serve`: OpenAI's endpoints, Verbatim's own, and the protection of the server.

Needs the extra `serve` (`pip install '.[serve]'`), except `settings` and `tokens`, which commands import.
"""

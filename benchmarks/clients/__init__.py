"""Other people's clients against `verbatim serve`, unmodified, in an environment of their own.

    python -m benchmarks.clients [--env FOLDER] [--clients openai lm_eval ...]

The environment is made once (`requirements.txt`). The model is the storyteller with a chat
template that has tools. Each case makes the client's usual calls, and compares what can be compared.
"""

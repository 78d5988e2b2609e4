"""Third-party clients, unmodified, against `verbatim serve`, in their own environment.

    python -m benchmarks.clients [--env FOLDER] [--clients openai lm_eval ...]

The environment is created once (`requirements.txt`). The model is the storyteller with a chat template that
supports tools. Each case makes the client's usual calls, and checks the answers where possible.
"""

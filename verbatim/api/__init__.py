"""The public API: `LLM`, sessions, `generate` on tensors, and the opening of an engine from options."""

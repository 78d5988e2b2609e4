"""Between text and token ids: the tokenizer, incremental detokenizing, and chat templates."""

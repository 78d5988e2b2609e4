"""The sampler: counter-based noise, logits processors and filters, in float32."""

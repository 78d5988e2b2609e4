"""Logits in, ids out: noise from identity, the filters, the one sampler, in float32."""

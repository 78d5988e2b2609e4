"""`ServerMetrics`: counters of a server, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verbatim.core import Result

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_GAUGES = {
    "running": "Sequences in the batch",
    "waiting": "Queued requests",
    "blocks_used": "KV blocks in use by sequences",
    "blocks_cached": "KV blocks in the prefix cache",
    "blocks_free": "Free KV blocks",
    "sessions": "Open sessions",
}
_COUNTS = {
    "forwards": "Forwards of the model",
    "tokens": "Generated tokens",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "preemptions": "Preemptions of sequences",
}


class ServerMetrics(Collector):
    """Counters of requests, and the engine's current statistics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._stats: dict[str, Any] = {}
        self.registry.register(self)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"verbatim_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"verbatim_{name}", text, buckets=buckets, registry=self.registry)

        self.answers = counter("http_answers", "Responses by path and status", "path", "status")
        self.turned_away = counter("turned_away", "Requests rejected with 429: too many requests")
        self.left = counter("clients_gone", "Clients that disconnected before the end")
        self._ended = counter("completions", "Completions by finish reason", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests")
        self._made = counter("completion_tokens", "Completion tokens of finished requests")
        self._queue = histogram("queue_seconds", "Time from arrival to first forward", _SECONDS)
        self._first = histogram("first_token_seconds", "Time to first token", _SECONDS)
        self._each = histogram("per_token_seconds", "Time per token after the first", _PER_TOKEN)
        self._all = histogram("request_seconds", "Time from arrival to last token", _SECONDS)

    def note(self, results: Iterable[Result]) -> None:
        """Count finished requests."""
        for result in results:
            self._prompt.inc(len(result.prompt_token_ids))
            for output in result.outputs:
                self._ended.labels(output.finish_reason.value).inc()
                self._made.inc(len(output.token_ids))
            self._queue.observe(result.metrics.queue_s)
            self._all.observe(result.metrics.total_s)
            if any(output.token_ids for output in result.outputs):
                self._first.observe(result.metrics.first_token_s)
                if result.metrics.per_token_s > 0:
                    self._each.observe(result.metrics.per_token_s)

    def text(self, stats: dict[str, Any]) -> bytes:
        """Return all metrics as text, with the engine's current `stats`."""
        self._stats = stats
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []  # called at registration, before there are statistics

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        for name, text in _GAUGES.items():
            if name in stats:
                yield GaugeMetricFamily(f"verbatim_{name}", text, stats[name])
        for name, text in _COUNTS.items():
            if name in stats:
                yield CounterMetricFamily(f"verbatim_{name}", text, stats[name])
        draft = stats.get("draft")
        if draft is not None:
            drafted, accepted = draft["drafted"], draft["accepted"]
            yield CounterMetricFamily("verbatim_drafted_tokens", "Drafted tokens", drafted)
            yield CounterMetricFamily("verbatim_accepted_tokens", "Accepted draft tokens", accepted)

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
_STATS = {
    "running": (GaugeMetricFamily, "Sequences in the batch"),
    "waiting": (GaugeMetricFamily, "Queued requests"),
    "blocks_used": (GaugeMetricFamily, "KV blocks in use by sequences"),
    "blocks_cached": (GaugeMetricFamily, "KV blocks in the prefix cache"),
    "blocks_free": (GaugeMetricFamily, "Free KV blocks"),
    "sessions": (GaugeMetricFamily, "Open sessions"),
    "forwards": (CounterMetricFamily, "Forwards of the model"),
    "tokens": (CounterMetricFamily, "Generated tokens"),
    "cached_tokens": (CounterMetricFamily, "Prompt tokens found in the prefix cache"),
    "preemptions": (CounterMetricFamily, "Preemptions of sequences"),
    "drafted_tokens": (CounterMetricFamily, "Drafted tokens"),
    "accepted_tokens": (CounterMetricFamily, "Accepted draft tokens"),
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
        self.rejected = counter("turned_away", "Requests rejected with 429: too many requests")
        self.disconnected = counter("clients_gone", "Clients that disconnected before the end")
        self._completions = counter("completions", "Completions by finish reason", "reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self._new_tokens = counter("completion_tokens", "Completion tokens of finished requests")
        self._queue_s = histogram("queue_seconds", "Time from arrival to first forward", _SECONDS)
        self._first_token_s = histogram("first_token_seconds", "Time to first token", _SECONDS)
        self._gap_s = histogram("per_token_seconds", "Time per token after the first", _PER_TOKEN)
        self._request_s = histogram("request_seconds", "Time from arrival to last token", _SECONDS)

    def note(self, results: Iterable[Result]) -> None:
        """Count finished requests."""
        for result in results:
            self._prompt_tokens.inc(len(result.prompt_token_ids))
            for output in result.outputs:
                self._completions.labels(output.finish_reason.value).inc()
                self._new_tokens.inc(len(output.token_ids))
            self._queue_s.observe(result.metrics.queue_s)
            self._request_s.observe(result.metrics.total_s)
            if any(output.token_ids for output in result.outputs):
                self._first_token_s.observe(result.metrics.first_token_s)
                if result.metrics.per_token_s > 0:
                    self._gap_s.observe(result.metrics.per_token_s)

    def text(self, stats: dict[str, Any]) -> bytes:
        """Return all metrics as text, with the engine's current `stats`."""
        self._stats = stats
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        return []  # called at registration, before there are statistics

    def collect(self) -> Iterable[Metric]:
        draft = self._stats.get("draft") or {}
        stats = self._stats | {f"{name}_tokens": count for name, count in draft.items()}
        for name, (family, text) in _STATS.items():
            if name in stats:
                yield family(f"verbatim_{name}", text, stats[name])

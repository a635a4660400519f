"""The engine's metrics in Prometheus text, named as FastDeploy names them under ``fastengine:``.

Counters and histograms are plain numbers that the engine loop updates; gauges are read from the engine's
state at scrape, so that they can't drift.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "fastengine:"

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 30, 60, 120, 300, 600)
PER_TOKEN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 10, 60, 600)
STEP_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Histogram:
    """Counts by bucket. An observation may stand for several equal ones."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it) for each bucket, the last one ``+Inf``."""
        running = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(_bound_text, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return buckets


def _bound_text(bound: float) -> str:
    return repr(float(bound))


HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From a request's arrival in the engine to its first token.", LATENCY_BUCKETS_S),
    "time_per_output_token_seconds": ("Between two tokens of one request.", PER_TOKEN_BUCKETS_S),
    "e2e_request_latency_seconds": ("From a request's arrival in the engine to its end.", LATENCY_BUCKETS_S),
    "request_queue_time_seconds": ("From arrival to the first step.", LATENCY_BUCKETS_S),
    "request_inference_time_seconds": ("From the first step to the end.", LATENCY_BUCKETS_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", LATENCY_BUCKETS_S),
    "request_decode_time_seconds": ("From the first token to the end.", LATENCY_BUCKETS_S),
    "request_prompt_tokens": ("Prompt tokens of a finished request.", TOKEN_BUCKETS),
    "request_generation_tokens": ("Output tokens of a finished request.", TOKEN_BUCKETS),
    "step_time_seconds": ("From publishing a step to its result.", STEP_BUCKETS_S),
    "step_tokens": ("Tokens computed in one step.", TOKEN_BUCKETS),
    "worker_recovery_seconds": ("From losing the workers to having them again.", LATENCY_BUCKETS_S),
}
COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens of requests that have produced a token.",
    "generation_tokens": "Output tokens produced.",
    "num_preemptions": "Running requests that gave up their blocks.",
    "recomputed_tokens": "Tokens computed again after preemptions, pauses and worker crashes.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_steps": "Steps answered by the workers.",
    "worker_crashes": "Times the workers were lost.",
    "weight_updates": "Successful weight updates.",
}
FINISH_REASONS = ("stop", "length", "abort", "error")

Gauges = Mapping[str, tuple[str, float]]


class EngineMetrics:
    """Numbers of one engine. ``gauges`` returns name -> (help, value) and is called at scrape."""

    def __init__(self, model_name: str, gauges: Callable[[], Gauges], info: Callable[[], Mapping[str, str]]):
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self, model_name, gauges, info))

    def render(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _EngineCollector(Collector):
    def __init__(self, metrics: EngineMetrics, model_name: str, gauges: Callable[[], Gauges], info: Callable[[], Mapping[str, str]]):
        self._metrics = metrics
        self._model_name = model_name
        self._gauges = gauges
        self._info = info

    def describe(self) -> Iterable[Metric]:
        return []  # without it, registering would call collect() before the engine exists

    def collect(self) -> Iterable[Metric]:
        label = ["model_name"]
        model = [self._model_name]
        for name, (text, value) in self._gauges().items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=label)
            gauge.add_metric(model, value)
            yield gauge
        info = dict(self._info())
        state = GaugeMetricFamily(PREFIX + "cache_config_info", "Settings of the KV cache and the version of the weights.", labels=[*label, *info])
        state.add_metric([*model, *info.values()], 1)
        yield state
        for name, value in self._metrics.counters.items():
            counter = CounterMetricFamily(PREFIX + name, COUNTERS[name], labels=label)
            counter.add_metric(model, value)
            yield counter
        finished = CounterMetricFamily(PREFIX + "request_success", "Finished requests by reason.", labels=[*label, "finished_reason"])
        for reason, value in self._metrics.finished.items():
            finished.add_metric([*model, reason], value)
        yield finished
        for name, histogram in self._metrics.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name][0], labels=label)
            family.add_metric(model, histogram.cumulative(), histogram.total)
            yield family

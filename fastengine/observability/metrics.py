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
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
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
    "request_queue_time_seconds": ("From arrival to the first step.", LATENCY_BUCKETS_S),
    "request_inference_time_seconds": ("From the first step to the end.", LATENCY_BUCKETS_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", LATENCY_BUCKETS_S),
    "request_decode_time_seconds": ("From the first token to the end.", LATENCY_BUCKETS_S),
    "request_params_max_tokens": ("max_tokens of requests that set it.", TOKEN_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of a finished request.", TOKEN_BUCKETS),
    "request_generation_tokens": ("Output tokens of a finished request.", TOKEN_BUCKETS),
    "step_time_seconds": ("From publishing a step to its result.", STEP_BUCKETS_S),
    "step_batch_size": ("Sequences in one step.", BATCH_BUCKETS),
    "step_tokens": ("Tokens computed in one step.", TOKEN_BUCKETS),
    "worker_recovery_seconds": ("From losing the workers to having them again.", LATENCY_BUCKETS_S),
}
E2E_LATENCY = "e2e_request_latency_seconds"
COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens of requests that have produced a token.",
    "generation_tokens": "Output tokens produced.",
    "num_preemptions": "Running requests that gave up their blocks.",
    "recomputed_tokens": "Tokens computed again after preemptions, pauses and worker crashes.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "refused_requests": "Requests answered with an error at once: unusable, or the queues were full.",
    "started_requests": "Requests that left the waiting queue for their first step.",
    "prefix_cache_hit_requests": "Started requests that found a part of their prompt in the prefix cache.",
    "prefix_cache_host_hits": "Tokens found in the prefix cache whose KV was brought back from the host.",
    "prefix_cache_copied_hits": "Tokens found in the prefix cache inside of a block, which was copied for them.",
    "swapped_out_blocks": "KV blocks copied to the host when the device had to give them up.",
    "swapped_in_blocks": "KV blocks copied back from the host.",
    "stored_blocks": "KV blocks written to files.",
    "loaded_blocks": "KV blocks read back from files.",
    "storage_failures": "KV blocks that could not be written or read.",
    "num_steps": "Steps answered by the workers.",
    "worker_crashes": "Times the workers were lost.",
    "worker_restarts": "Times a new group of workers took over.",
    "weight_updates": "Successful weight updates.",
}
FINISH_REASONS = ("stop", "length", "abort", "error")

Gauges = Mapping[str, tuple[str, float]]
Infos = Mapping[str, Mapping[str, str]]
INFO_TEXTS = {
    "cache_config_info": "Settings of the KV cache, as labels.",
    "weight_version_info": "The version of the weights that serve, as a label.",
}


class EngineMetrics:
    """Numbers of one engine. ``gauges`` (name -> help, value) and ``infos`` (name -> labels) are called at scrape."""

    def __init__(self, model_name: str, gauges: Callable[[], Gauges], infos: Callable[[], Infos]):
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.e2e_latency = {reason: Histogram(LATENCY_BUCKETS_S) for reason in FINISH_REASONS}
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self, model_name, gauges, infos))

    def render(self) -> str:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


class _EngineCollector(Collector):
    def __init__(self, metrics: EngineMetrics, model_name: str, gauges: Callable[[], Gauges], infos: Callable[[], Infos]):
        self._metrics = metrics
        self._model_name = model_name
        self._gauges = gauges
        self._infos = infos

    def describe(self) -> Iterable[Metric]:
        return []  # without it, registering would call collect() before the engine exists

    def collect(self) -> Iterable[Metric]:
        label = ["model_name"]
        model = [self._model_name]
        for name, (text, value) in self._gauges().items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=label)
            gauge.add_metric(model, value)
            yield gauge
        for name, info in self._infos().items():
            state = GaugeMetricFamily(PREFIX + name, INFO_TEXTS[name], labels=[*label, *info])
            state.add_metric([*model, *info.values()], 1)
            yield state
        for name, value in self._metrics.counters.items():
            counter = CounterMetricFamily(PREFIX + name, COUNTERS[name], labels=label)
            counter.add_metric(model, value)
            yield counter
        finished = CounterMetricFamily(PREFIX + "request_success", "Finished requests by reason.", labels=[*label, "finish_reason"])
        for reason, value in self._metrics.finished.items():
            finished.add_metric([*model, reason], value)
        yield finished
        latency = HistogramMetricFamily(PREFIX + E2E_LATENCY, "From a request's arrival in the engine to its end.", labels=[*label, "finish_reason"])
        for reason, histogram in self._metrics.e2e_latency.items():
            latency.add_metric([*model, reason], histogram.cumulative(), histogram.total)
        yield latency
        for name, histogram in self._metrics.histograms.items():
            family = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name][0], labels=label)
            family.add_metric(model, histogram.cumulative(), histogram.total)
            yield family

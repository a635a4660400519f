"""The names and labels that dashboards depend on, and buckets that reach 600 s."""

from __future__ import annotations

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from fastengine.observability.metrics import COUNTERS, Histogram
from fastengine.protocol.control import GetMetrics, Pause, Resume, UpdateWeights
from tests.engine.driver import Driver
from tests.engine.test_steps import prompt

GAUGES = {
    *("num_requests_running", "num_requests_waiting", "num_requests_preempted", "num_requests_waiting_kv", "num_queued_tokens"),
    *("batch_size", "max_batch_size", "available_batch_size", "num_steps_in_flight", "is_paused", "is_sleeping"),
    *("max_gpu_block_num", "available_gpu_block_num", "free_gpu_block_num", "prefix_cache_block_num", "gpu_cache_usage_perc"),
    *("max_cpu_block_num", "available_cpu_block_num", "cpu_cache_usage_perc", "max_disk_block_num", "disk_cache_block_num"),
    *("hit_req_rate", "hit_token_rate", "gpu_hit_token_rate", "cpu_hit_token_rate"),
    *("cache_config_info", "weight_version_info"),
}
LATENCIES = {
    *("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds", "step_time_seconds"),
    "worker_recovery_seconds",
}
SIZES = {"request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens", "step_tokens", "step_batch_size"}


def scraped(driver: Driver) -> dict[str, Metric]:
    text = driver.call(GetMetrics()).result["text"]
    return {family.name.removeprefix("fastengine:"): family for family in text_string_to_metric_families(text)}


def value(metrics: dict[str, Metric], name: str, suffix: str = "", **labels: str) -> float:
    (found,) = [s.value for s in metrics[name].samples if s.name == f"fastengine:{name}{suffix}" and labels.items() <= s.labels.items()]
    return found


@pytest.fixture
def driver() -> Driver:
    return Driver(served_model_name="tiny", num_blocks=12, num_host_blocks=40)


def test_every_name_is_there_with_its_type_and_the_models_label(driver: Driver) -> None:
    metrics = scraped(driver)
    expected = dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(LATENCIES | SIZES, "histogram")
    expected |= dict.fromkeys((*COUNTERS, "request_success"), "counter")
    assert {name: family.type for name, family in metrics.items()} == expected
    for family in metrics.values():
        assert family.documentation
        assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)


def test_latency_buckets_reach_600_s(driver: Driver) -> None:
    metrics = scraped(driver)
    for name in LATENCIES:
        bounds = {float(s.labels["le"]) for s in metrics[name].samples if s.name.endswith("_bucket")}
        assert max(bounds - {float("inf")}) == 600.0, name


def test_finished_requests_are_counted_by_reason(driver: Driver) -> None:
    driver.add_and_run(prompt(1, 5), max_tokens=3, ignore_eos=True)
    driver.add(prompt(2, 5), max_tokens=50, ignore_eos=True, timeout_s=0.0005)
    driver.add(prompt(2, 5), max_tokens=0)
    driver.turn()
    driver.turn()
    metrics = scraped(driver)
    assert value(metrics, "refused_requests", "_total") == 1
    counts = {reason: value(metrics, "request_success", "_total", finish_reason=reason) for reason in ("stop", "length", "abort", "error")}
    assert counts == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    assert value(metrics, "e2e_request_latency_seconds", "_count", finish_reason="length") == 1
    assert value(metrics, "e2e_request_latency_seconds", "_count", finish_reason="error") == 1
    assert value(metrics, "request_params_max_tokens", "_sum") == 53


def test_steps_tokens_and_cache_hits(driver: Driver) -> None:
    for _ in range(2):
        driver.add_and_run(prompt(1, 20), max_tokens=5, ignore_eos=True)
    metrics = scraped(driver)
    assert value(metrics, "num_steps", "_total") == value(metrics, "step_batch_size", "_count") == len(driver.worker.step_tokens)
    assert value(metrics, "step_tokens", "_sum") == sum(driver.worker.step_tokens)
    assert value(metrics, "step_batch_size", "_sum") == len(driver.worker.step_tokens)  # one sequence at a time
    assert value(metrics, "generation_tokens", "_total") == 10
    assert value(metrics, "prefix_cache_queries", "_total") == 40
    assert value(metrics, "prefix_cache_hits", "_total") == 19
    assert value(metrics, "prefix_cache_copied_hits", "_total") == 3
    assert value(metrics, "hit_req_rate") == 0.5
    assert value(metrics, "hit_token_rate") == value(metrics, "gpu_hit_token_rate") == 19 / 40
    assert value(metrics, "time_to_first_token_seconds", "_count") == 2
    assert value(metrics, "time_per_output_token_seconds", "_count") == 8


def test_swaps_preemptions_restarts_and_versions(driver: Driver) -> None:
    received = [driver.add(prompt(i, 30), max_tokens=40, ignore_eos=True) for i in range(4)]
    driver.run()
    driver.add(prompt(9, 30), max_tokens=40, ignore_eos=True)
    for _ in range(5):
        driver.turn()
    driver.crash()
    driver.run()
    driver.call(Pause())
    driver.call(UpdateWeights(version="v2"))
    driver.call(Resume())
    metrics = scraped(driver)
    assert all(one.finish_reason == "length" for one in received)
    for name in ("num_preemptions", "swapped_out_blocks", "swapped_in_blocks", "prefix_cache_host_hits", "recomputed_tokens"):
        assert value(metrics, name, "_total") > 0, name
    for name in ("worker_crashes", "worker_restarts", "weight_updates"):
        assert value(metrics, name, "_total") == 1, name
    assert value(metrics, "worker_recovery_seconds", "_count") == 1
    assert value(metrics, "weight_version_info", weight_version="v2") == 1
    assert value(metrics, "max_cpu_block_num") == 40


def test_an_observation_may_stand_for_several() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, 3)
    histogram.observe(9.0)
    assert histogram.cumulative() == [("1.0", 1), ("2.0", 4), ("+Inf", 5)]
    assert histogram.total == 14.5

from __future__ import annotations

import dataclasses
import json
import re
from importlib.resources import files

from llmcore.api.bridge import Load
from llmcore.api.counters import COUNTS, GAP_SECONDS, ServerFigures
from llmcore.api.protocols import RequestRecord
from llmcore_server.prometheus.sink import PrometheusSink
from llmcore_server.prometheus.tables import metrics

RECORD = RequestRecord(
    request_id="r",
    dialect="openai",
    prompt_tokens=100,
    cached_tokens=60,
    output_tokens=11,
    max_new_tokens=50,
    finish="stop",
    first_token=0.5,
    duration=1.5,
)


def values(sink: PrometheusSink) -> dict[str, float]:
    text = sink.page()[1].decode()
    return {name: float(value) for name, value in re.findall(r"^(llmcore_\w+) (\S+)$", text, re.M)}


def test_requests_are_counted_by_how_they_ended() -> None:
    sink = PrometheusSink()
    for finish in ("stop", "length", "abort", "error"):
        sink.request_finished(dataclasses.replace(RECORD, finish=finish))
    got = values(sink)
    assert got["llmcore_request_count_total"] == 4
    assert got["llmcore_request_success_total"] == 2
    assert got["llmcore_request_abort_total"] == 1
    assert got["llmcore_request_failure_total"] == 1
    assert got["llmcore_request_input_length_count"] == 3, "a failed request has no lengths to observe"


def test_times_and_lengths() -> None:
    sink = PrometheusSink()
    sink.request_finished(RECORD)
    got = values(sink)
    assert got["llmcore_request_inference_duration_sum"] == 1.5
    assert got["llmcore_request_first_token_duration_sum"] == 0.5
    assert got["llmcore_request_mean_time_per_token_duration_sum"] == 0.1
    assert got["llmcore_request_generated_tokens_sum"] == 11
    assert got["llmcore_cache_length_sum"] == 60
    assert got["llmcore_cache_ratio_sum"] == 0.6


def test_snapshots_set_gauges_and_only_ever_raise_totals() -> None:
    sink = PrometheusSink()
    sink.snapshot(Load(waiting=3, running=2, kv_live=10, kv_free=5, output_tokens=100).figures())
    sink.snapshot(Load(waiting=1, kv_cached=7, output_tokens=130, preemptions=2, cache={"nodes": 9}).figures())
    got = values(sink)
    assert got["llmcore_queue_size"] == 1
    assert got["llmcore_batch_current_size"] == 0
    assert (got["llmcore_kv_live"], got["llmcore_kv_cached"], got["llmcore_kv_free"]) == (0, 7, 0)
    assert got["llmcore_generated_tokens_total"] == 130
    assert got["llmcore_preemptions_total"] == 2
    assert 'llmcore_prefix_cache{figure="nodes"} 9.0' in sink.page()[1].decode()


def test_figures_that_endpoint_pickers_read() -> None:
    sink = PrometheusSink()
    assert "llmcore_cache_config_info{" not in sink.page()[1].decode(), "before an engine has said it"
    sink.snapshot(Load(kv_live=96, kv_total=160, kv_granule=16).figures())
    sink.snapshot(Load(kv_live=96, kv_total=128, kv_granule=16).figures())
    assert values(sink)["llmcore_kv_usage"] == 0.75
    assert re.findall("llmcore_cache_config_info{.*", sink.page()[1].decode()) == [
        'llmcore_cache_config_info{block_size="16",num_gpu_blocks="8"} 1.0'
    ]


def test_every_metric_says_what_it_is() -> None:
    text = PrometheusSink().page()[1].decode()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    assert len(names) >= 25
    for name in names:
        help_text = re.search(rf"^# HELP {name} (.+)$", text, re.M)
        assert help_text is not None and help_text[1].endswith(".")
    assert "_created" not in text


def test_each_of_several_engines_has_figures() -> None:
    sink = PrometheusSink()
    assert "llmcore_engine_up" not in sink.page()[1].decode()
    load = Load(running=2, waiting=3, kv_live=1, kv_total=4, prompt_tokens=50, cached_tokens=20)
    each = {"engine-0": {**load.figures(), "up": 1.0}, "engine-1": {**Load().figures(), "up": 0.0}}
    sink.server(ServerFigures(engines=each))
    text = sink.page()[1].decode()
    for line in (
        'engine_up{engine="engine-0"} 1.0',
        'engine_up{engine="engine-1"} 0.0',
        'engine_queue_size{engine="engine-0"} 3.0',
        'engine_kv_usage{engine="engine-0"} 0.25',
        'engine_prefix_hit_tokens_total{engine="engine-0"} 20.0',
    ):
        assert f"\nllmcore_{line}\n" in text


def test_two_sinks_do_not_share_figures() -> None:
    one, two = PrometheusSink(), PrometheusSink()
    one.request_finished(RECORD)
    assert values(two)["llmcore_request_count_total"] == 0


def test_what_is_documented_is_what_there_is() -> None:
    sink = PrometheusSink()
    counts = {(name, tuple("x" for _ in labels)): 1 for name, (labels, _) in COUNTS.items()}
    each = {"engine-0": {**Load().figures(), "up": 1.0}}
    sink.server(ServerFigures(counts, (1,) * (len(GAP_SECONDS) + 1), 2.5, each))
    sink.snapshot(Load(kv_total=4, kv_granule=1, cache={"nodes": 1}).figures())
    sink.request_finished(RECORD)
    text = sink.page()[1].decode()
    shown = {(m[1], m[2]) for m in re.finditer(r"^# TYPE (\S+) (\S+)$", text, re.M)}
    assert shown == {(metric.name, metric.kind) for metric in metrics()}
    for metric in metrics():
        first = re.search(rf"^{metric.name}(?:_bucket)?(?:{{(.*?)}})? ", text, re.M)
        assert first is not None, metric.name
        labels = set(re.findall(r'(\w+)="', first[1] or "")) - {"le"}
        assert labels == set(metric.labels), metric.name


def test_gaps_are_a_histogram() -> None:
    sink = PrometheusSink()
    gaps = [0] * (len(GAP_SECONDS) + 1)
    gaps[0], gaps[-1] = 3, 1
    sink.server(ServerFigures({}, tuple(gaps), 12.5))
    text = sink.page()[1].decode()
    assert 'llmcore_inter_token_duration_bucket{le="0.001"} 3.0' in text
    assert 'llmcore_inter_token_duration_bucket{le="10"} 3.0' in text
    assert 'llmcore_inter_token_duration_bucket{le="+Inf"} 4.0' in text
    got = values(sink)
    assert (got["llmcore_inter_token_duration_count"], got["llmcore_inter_token_duration_sum"]) == (4, 12.5)


def test_the_grafana_dashboard_uses_metrics_that_exist() -> None:
    text = files("llmcore_server.prometheus").joinpath("grafana.json").read_text()
    board = json.loads(text)
    known = {metric.name: metric for metric in metrics()}
    used: set[str] = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"llmcore_\w+", target["expr"]):
                family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in known else name
                assert family in known, f"{panel['title']}: {name}"
                assert (family != name) == (known[family].kind == "histogram"), name
                used.add(family)
            for labels in re.findall(r"by \(([^)]*)\)", target["expr"]):
                [metric] = {re.sub(r"_bucket$", "", name) for name in re.findall(r"llmcore_\w+", target["expr"])}
                assert set(labels.split(", ")) <= {*known[metric].labels, "le"}, target["expr"]
    assert len(used) >= 18
    assert not re.search(r"https?://", text)

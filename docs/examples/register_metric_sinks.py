"""A metric sink that counts requests by their finish reason. It runs in the supervisor, not in the engine."""

from collections import Counter

from llmcore.api import MetricSinkSpec, hookimpl


@hookimpl
def register_metric_sinks():
    yield MetricSinkSpec(name="tally", make=f"{__name__}:Tally")


class Tally:
    """protocols.MetricSink."""

    def __init__(self):
        self.ends = Counter()
        self.newest = {}

    def request_finished(self, record):
        self.ends[record.finish] += 1

    def snapshot(self, values):
        self.newest = dict(values)

    def server(self, figures):
        failures = {key: n for key, n in figures.counts.items() if key[0] == "plugin_failures"}
        self.newest["plugin_failures"] = sum(failures.values())

    def page(self):
        return None  # another sink answers /metrics

"""Prometheus metrics in a registry of their own: requests and tokens counted here, the engine read when scraped.

Owned by the coordinator's loop. Counting costs well under a microsecond per token; whatever can be read from the
scheduler or from the last look at the cluster is not counted at all.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lamina.coordinator.api.generation import Finished
from lamina.coordinator.engine.scheduler import Scheduler
from lamina.coordinator.telemetry.histogram import Histogram
from lamina.spec.errors import LaminaError

_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_REQUEST_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_RATE_WINDOW_S = 10.0

_HISTOGRAMS = {
    "time_to_first_token_seconds": (_REQUEST_BOUNDS_S, "From the queue to the first token."),
    "inter_token_latency_seconds": (_TOKEN_BOUNDS_S, "Between two tokens of a request."),
    "e2e_request_latency_seconds": (_REQUEST_BOUNDS_S, "From the queue to the last token."),
    "request_queue_time_seconds": (_REQUEST_BOUNDS_S, "From the queue to the first step."),
    "request_prefill_time_seconds": (_REQUEST_BOUNDS_S, "From the first step to the first token."),
    "request_decode_time_seconds": (_REQUEST_BOUNDS_S, "From the first token to the last."),
}

MoreMetrics = Callable[[], Iterator[Metric]]


class TokenTimer:
    """Times the tokens of one sequence."""

    __slots__ = ("_last_s", "_metrics")

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics
        self._last_s = 0.0

    def tick(self) -> None:
        """A token came."""
        now = time.monotonic()
        metrics = self._metrics
        metrics.num_generated_tokens += 1
        if self._last_s:
            metrics.inter_token.observe(now - self._last_s)
        self._last_s = now


class Metrics:
    """Counts what happens and tells Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.num_generated_tokens = 0
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self.inter_token = self._histograms["inter_token_latency_seconds"]
        self._num_prompt_tokens = 0
        self._ends: dict[str, int] = {}
        self._replans: dict[str, int] = {}
        self._scheduler: Scheduler | None = None
        self._kept = (0, 0, 0)  # preemptions, prefix queries and hits seen before the present scheduler was watched
        self._start = (0, 0, 0)  # what it had counted then: one that was suspended is watched again
        self._more: list[MoreMetrics] = []
        self._rate_samples: deque[tuple[float, int]] = deque()

    # -- counting

    def watch(self, scheduler: Scheduler | None) -> None:
        """Read this scheduler from now on; counters go on from those of the one before."""
        self._kept = self._totals()
        self._scheduler = scheduler
        self._start = _counts_of(scheduler) if scheduler is not None else (0, 0, 0)

    def add_source(self, source: MoreMetrics) -> None:
        """Further metrics, read when scraped."""
        self._more.append(source)

    def token_timer(self) -> TokenTimer:
        """A timer for the tokens of one sequence."""
        return TokenTimer(self)

    def count_end(self, end: Finished) -> None:
        """A choice has finished."""
        stats = end.stats
        self._num_prompt_tokens += stats.num_prompt_tokens
        self._ends[end.reason] = self._ends.get(end.reason, 0) + 1
        parts = (stats.queue_s, stats.prefill_s, stats.decode_s)
        for name, value in zip(("queue", "prefill", "decode"), parts, strict=True):
            if value is not None:
                self._histograms[f"request_{name}_time_seconds"].observe(value)
        if stats.queue_s is not None and stats.prefill_s is not None:
            self._histograms["time_to_first_token_seconds"].observe(stats.queue_s + stats.prefill_s)
            self._histograms["e2e_request_latency_seconds"].observe(sum(part for part in parts if part is not None))

    def count_failure(self) -> None:
        """A request ended with an error."""
        self._ends["error"] = self._ends.get("error", 0) + 1

    def count_abort(self) -> None:
        """A client went away."""
        self._ends["abort"] = self._ends.get("abort", 0) + 1

    def count_replan(self, error: LaminaError) -> None:
        """The model was brought up again after this; its kind is the reason, like worker_lost."""
        reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
        self._replans[reason] = self._replans.get(reason, 0) + 1

    def tokens_per_s(self) -> float:
        """Rate of generated tokens over the last seconds, between the calls of this method."""
        now, samples = time.monotonic(), self._rate_samples
        samples.append((now, self.num_generated_tokens))
        while len(samples) > 2 and now - samples[1][0] >= _RATE_WINDOW_S:
            samples.popleft()
        elapsed_s = now - samples[0][0]
        return (self.num_generated_tokens - samples[0][1]) / elapsed_s if elapsed_s > 0 else 0.0

    # -- telling

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        yield from self._engine_metrics()
        yield CounterMetricFamily(
            "lamina_prompt_tokens", "Prompt tokens of finished requests.", self._num_prompt_tokens
        )
        yield CounterMetricFamily("lamina_generation_tokens", "Tokens generated.", self.num_generated_tokens)
        ends = CounterMetricFamily(
            "lamina_request_success", "Requests that ended, by reason.", labels=["finished_reason"]
        )
        for reason, count in self._ends.items():
            ends.add_metric([reason], count)
        yield ends
        replans = CounterMetricFamily(
            "lamina_replans", "Times the model was brought up again, by what ended it before.", labels=["reason"]
        )
        for reason, count in self._replans.items():
            replans.add_metric([reason], count)
        yield replans
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(f"lamina_{name}", _HISTOGRAMS[name][1])
            family.add_metric([], histogram.cumulative(), histogram.sum)
            yield family
        for source in self._more:
            yield from source()

    def _engine_metrics(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        running, waiting = (scheduler.num_running, scheduler.num_waiting) if scheduler else (0, 0)
        usage = scheduler.kv_usage_ratio if scheduler else 0.0
        yield GaugeMetricFamily("lamina_num_requests_running", "Requests admitted.", running)
        yield GaugeMetricFamily("lamina_num_requests_waiting", "Requests that wait for admission.", waiting)
        yield GaugeMetricFamily("lamina_kv_cache_usage_ratio", "Share of the KV blocks that sequences hold.", usage)
        if scheduler is not None:
            blocks = GaugeMetricFamily(
                "lamina_kv_cache_blocks", "KV blocks: used by sequences, cached prefixes, free.", labels=["state"]
            )
            for state, count in scheduler.ledger.num_by_state.items():
                blocks.add_metric([state], count)
            yield blocks
            window_blocks = scheduler.ledger.num_window_by_state
            if window_blocks is not None:
                blocks = GaugeMetricFamily(
                    "lamina_kv_cache_window_blocks",
                    "KV blocks of layers with a sliding window: used by sequences, cached prefixes, free.",
                    labels=["state"],
                )
                for state, count in window_blocks.items():
                    blocks.add_metric([state], count)
                yield blocks
            yield GaugeMetricFamily(
                "lamina_kv_cache_promised_blocks",
                "KV blocks, cached or free, set aside for admitted requests.",
                scheduler.ledger.num_promised,
            )
        preemptions, queries, hits = self._totals()
        yield CounterMetricFamily("lamina_num_preemptions", "Sequences preempted for want of blocks.", preemptions)
        yield CounterMetricFamily(
            "lamina_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries
        )
        yield CounterMetricFamily("lamina_prefix_cache_hits", "Prompt tokens found there.", hits)

    def _totals(self) -> tuple[int, int, int]:
        scheduler = self._scheduler
        if scheduler is None:
            return self._kept
        now = _counts_of(scheduler)
        preemptions, queries, hits = (
            kept + value - start for kept, value, start in zip(self._kept, now, self._start, strict=True)
        )
        return preemptions, queries, hits


def _counts_of(scheduler: Scheduler) -> tuple[int, int, int]:
    return scheduler.num_preemptions, scheduler.num_prefix_queries, scheduler.num_prefix_hits

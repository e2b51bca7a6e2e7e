"""What an engine says of itself at `/metrics`, read from Prometheus's text without I/O.

Of the hundreds of lines that an engine writes, a handful is wanted: they are found by one pattern per engine, and
nothing else is looked at. A name is matched whole (`vllm:num_requests_waiting` must not find `..._by_reason`), every
generation of it is known, series of several models or engine ranks are added up, and what is absent is None, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Meaning(StrEnum):
    """What a series tells."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_SHARE = "kv_share"  # of the KV memory, 0 to 1
    KV_BLOCKS = "kv_blocks"
    KV_BLOCK_TOKENS = "kv_block_tokens"
    KV_TOKENS = "kv_tokens"  # that fit
    KV_CONFIG = "kv_config"  # an info series: blocks and their size are labels
    STARTED = "started"  # of the process, seconds since the epoch
    TOTAL = "total"  # a counter that starts from zero with the process


_STARTED = {"process_start_time_seconds": Meaning.STARTED}
_VLLM = {
    "vllm:num_requests_running": Meaning.RUNNING,
    "vllm:num_requests_waiting": Meaning.WAITING,
    "vllm:kv_cache_usage_perc": Meaning.KV_SHARE,
    "vllm:gpu_cache_usage_perc": Meaning.KV_SHARE,  # before V1
    "vllm:cache_config_info": Meaning.KV_CONFIG,
    "vllm:generation_tokens_total": Meaning.TOTAL,
} | _STARTED
_SGLANG = {
    "sglang:num_running_reqs": Meaning.RUNNING,
    "sglang:num_queue_reqs": Meaning.WAITING,
    "sglang:token_usage": Meaning.KV_SHARE,
    "sglang:cache_config_info": Meaning.KV_CONFIG,
    "sglang:max_total_num_tokens": Meaning.KV_TOKENS,
    "sglang:generation_tokens_total": Meaning.TOTAL,
} | _STARTED
_TGI = {
    "tgi_batch_current_size": Meaning.RUNNING,
    "tgi_queue_size": Meaning.WAITING,
    "tgi_request_count": Meaning.TOTAL,
}
_LLAMACPP = {
    "llamacpp:requests_processing": Meaning.RUNNING,
    "llamacpp:requests_deferred": Meaning.WAITING,
    "llamacpp:kv_cache_usage_ratio": Meaning.KV_SHARE,  # until 2025
    "llamacpp:tokens_predicted_total": Meaning.TOTAL,
}
_TRTLLM = {
    "trtllm_num_requests_running": Meaning.RUNNING,
    "trtllm_num_requests_waiting": Meaning.WAITING,
    "trtllm_kv_cache_utilization": Meaning.KV_SHARE,
    "trtllm_kv_cache_tokens_per_block": Meaning.KV_BLOCK_TOKENS,
    "trtllm_kv_cache_max_blocks": Meaning.KV_BLOCKS,
    'nv_trt_llm_request_metrics{request_type="scheduled"}': Meaning.RUNNING,  # behind Triton
    'nv_trt_llm_request_metrics{request_type="waiting"}': Meaning.WAITING,
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}': Meaning.KV_SHARE,
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"}': Meaning.KV_BLOCK_TOKENS,
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"}': Meaning.KV_BLOCKS,
} | _STARTED


@dataclass(frozen=True, slots=True)
class Signals:
    """What one scrape told. None: it did not say."""

    running: float | None = None
    waiting: float | None = None
    kv_share: float | None = None
    kv_tokens: int | None = None
    started: float | None = None
    total: float | None = None

    @property
    def kv_used(self) -> int | None:
        """KV tokens in use."""
        if self.kv_share is None or self.kv_tokens is None:
            return None
        return int(self.kv_share * self.kv_tokens)

    def restarted_since(self, before: Signals) -> bool:
        """Whether another process answers than before: it began later, or counts from zero again."""
        if self.started is not None and before.started is not None:
            return self.started > before.started + 1.0
        return self.total is not None and before.total is not None and self.total < before.total


@dataclass(frozen=True)
class Vocabulary:
    """The names that one engine uses, and where it tells them; it is not to be asked more often than each `rest_s`."""

    path: str
    names: Mapping[str, Meaning]
    rest_s: float = 0.0

    @cached_property
    def _meanings(self) -> Mapping[bytes, list[tuple[bytes, Meaning]]]:
        """By name, what its series mean, each with the label that it must have."""
        found: dict[bytes, list[tuple[bytes, Meaning]]] = {}
        for name, meaning in self.names.items():
            metric, _, label = name.partition("{")
            found.setdefault(metric.encode(), []).append((label.rstrip("}").encode(), meaning))
        return found

    @cached_property
    def _line(self) -> re.Pattern[bytes]:
        wanted = b"|".join(map(re.escape, self._meanings))
        return re.compile(rb"^(%b)(?:\{([^\n]*)\})?[ \t]+(\S+)" % wanted, re.MULTILINE)

    def read(self, text: bytes) -> Signals:
        """Everything wanted in one text. Lines that make no sense are passed over."""
        found: dict[Meaning, list[float]] = {}
        capacity: list[int] = []
        for name, labels, value in self._line.findall(text):
            for label, meaning in self._meanings[name]:
                if label and label not in labels:
                    continue
                if meaning is Meaning.KV_CONFIG:
                    capacity += _tokens(labels)
                elif (number := _number(value)) is not None:
                    found.setdefault(meaning, []).append(number)
        shares = found.get(Meaning.KV_SHARE)
        started = found.get(Meaning.STARTED)
        return Signals(
            running=_sum(found.get(Meaning.RUNNING)),
            waiting=_sum(found.get(Meaning.WAITING)),
            kv_share=sum(shares) / len(shares) if shares else None,
            kv_tokens=_capacity(found, capacity),
            started=max(started) if started else None,
            total=_sum(found.get(Meaning.TOTAL)),
        )


def vocabularies() -> dict[str, Vocabulary]:
    """By the engine's name in the configuration; an engine that is not here tells nothing."""
    return {
        "vllm": Vocabulary("/metrics", _VLLM),
        "sglang": Vocabulary("/metrics", _SGLANG),
        "tgi": Vocabulary("/metrics", _TGI),
        # It sees that a client has left only when it has told nobody anything for a second, and that counts metrics.
        "llamacpp": Vocabulary("/metrics", _LLAMACPP, rest_s=5.0),
        "trtllm": Vocabulary("/prometheus/metrics", _TRTLLM),
    }


_LABEL = re.compile(rb'(block_size|num_gpu_blocks|page_size|num_pages)="(\d{1,9})"')


def _tokens(labels: bytes) -> list[int]:
    """KV tokens of one engine rank: its blocks times their size; nothing where a label is missing or None."""
    told = {name: int(value) for name, value in _LABEL.findall(labels)}
    size = told.get(b"block_size", told.get(b"page_size", 0))
    blocks = told.get(b"num_gpu_blocks", told.get(b"num_pages", 0))
    return [size * blocks] if size * blocks else []


def _capacity(found: Mapping[Meaning, list[float]], configured: list[int]) -> int | None:
    if configured:
        return sum(configured)
    if Meaning.KV_TOKENS in found:
        return int(sum(found[Meaning.KV_TOKENS])) or None
    blocks, size = found.get(Meaning.KV_BLOCKS), found.get(Meaning.KV_BLOCK_TOKENS)
    return int(sum(blocks) * max(size)) or None if blocks and size else None


def _number(value: bytes) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0.0 <= number < float("inf") else None


def _sum(values: list[float] | None) -> float | None:
    return sum(values) if values else None

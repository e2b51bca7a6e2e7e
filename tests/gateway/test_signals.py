"""What engines say of themselves: every generation of names, sums over models and ranks, and absent is never zero."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.signals import Signals, vocabularies

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="1000"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1234.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
process_start_time_seconds 1.7960574e+09
"""
OLD_VLLM = b"""vllm:num_requests_running{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:num_requests_swapped{model_name="m"} 8.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 6.0
sglang:num_grammar_queue_reqs{model_name="m"} 50.0
sglang:token_usage{model_name="m"} 0.1
sglang:cache_config_info{page_size="1",num_pages="50000"} 1.0
"""
TGI = b"tgi_batch_current_size 7\ntgi_queue_size 8\ntgi_batch_current_max_tokens 9\ntgi_request_count 10\n"
LLAMACPP = b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\nllamacpp:tokens_predicted_total 77\n"
TRTLLM = b"""trtllm_num_requests_running 1.0
trtllm_num_requests_waiting 2.0
trtllm_kv_cache_utilization 0.5
trtllm_kv_cache_tokens_per_block 32.0
trtllm_kv_cache_max_blocks 100.0
"""
TRITON = b"""nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 4
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 100
"""
CASES = [
    ("vllm", VLLM, Signals(7.0, 2.0, 0.5, 32_000, 1796057400.0, 1234.0)),
    ("vllm", OLD_VLLM, Signals(1.0, None, 0.5, None, None, None)),
    ("sglang", SGLANG, Signals(5.0, 6.0, 0.1, 50_000, None, None)),
    ("tgi", TGI, Signals(7.0, 8.0, None, None, None, 10.0)),
    ("llamacpp", LLAMACPP, Signals(2.0, 1.0, None, None, None, 77.0)),
    ("trtllm", TRTLLM, Signals(1.0, 2.0, 0.5, 3200, None, None)),
    ("trtllm", TRITON, Signals(4.0, 3.0, 0.5, 6400, None, None)),
]


@pytest.mark.parametrize(("engine", "text", "told"), CASES)
def test_every_engine_is_understood(engine: str, text: bytes, told: Signals) -> None:
    """By its own names, old and new, and nothing that only begins like them."""
    assert vocabularies()[engine].read(text) == told


@pytest.mark.parametrize("engine", vocabularies())
def test_what_is_absent_is_not_zero(engine: str) -> None:
    """An engine that logs no statistics answers 200 with nothing in it."""
    assert vocabularies()[engine].read(b"# nothing\n") == Signals()
    assert Signals().kv_used is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x", ""])
def test_nonsense_is_passed_over(value: str) -> None:
    """A number that cannot be is no number."""
    text = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 1\n".encode()
    assert vocabularies()["vllm"].read(text).waiting == 1.0
    assert vocabularies()["vllm"].read(text).running is None


@given(st.binary(max_size=300))
def test_any_bytes_can_be_read(junk: bytes) -> None:
    """Whatever a backend answers."""
    for vocabulary in vocabularies().values():
        vocabulary.read(junk + b"\n" + VLLM + junk)


def test_a_restart_is_seen() -> None:
    """By the time at which the process began, or by a counter that counts anew; not where one of both is unknown."""
    assert Signals(started=20.0).restarted_since(Signals(started=10.0))
    assert not Signals(started=10.0, total=1.0).restarted_since(Signals(started=10.0, total=5.0))
    assert Signals(total=1.0).restarted_since(Signals(total=5.0))
    assert not Signals(total=6.0).restarted_since(Signals(total=5.0))
    assert not Signals(total=6.0).restarted_since(Signals())
    assert not Signals().restarted_since(Signals(started=10.0, total=5.0))

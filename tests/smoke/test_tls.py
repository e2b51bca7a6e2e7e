"""TLS on both sides: a gateway that serves https, before one that is asked over https."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import trustme

from tests.service import Service, emulating, started

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "How?"}], "max_tokens": 5}
STREAM = CHAT | {"max_tokens": 30, "stream": True, "stream_options": {"include_usage": True}}


class Chain:
    """An emulator, a gateway before it that serves TLS, and a gateway before that one, both with certificates of one
    authority, which is trusted by whom `trusting` is True for."""

    def __init__(self, stack: ExitStack, folder: Path, trust: pytest.MonkeyPatch) -> None:
        authority, other = trustme.CA(), trustme.CA()
        self.emulator = emulating(stack, folder)
        self.context = ssl.create_default_context()
        authority.configure_trust(self.context)
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_pem.write_to_path(folder / "tls.key")
        (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        self.tls = {"cert": f"file:{folder}/tls.crt", "key": f"file:{folder}/tls.key"}
        authority.cert_pem.write_to_path(folder / "trusted.pem")
        other.cert_pem.write_to_path(folder / "other.pem")
        self.inner = self.gateway(stack, folder / "inner", self.emulator)
        trust.setenv("SSL_CERT_FILE", str(folder / "trusted.pem"))
        self.outer = self.gateway(stack, folder / "outer", self.inner.api)
        trust.setenv("SSL_CERT_FILE", str(folder / "other.pem"))
        self.doubtful = self.gateway(stack, folder / "doubtful", self.inner.api)

    def gateway(self, stack: ExitStack, folder: Path, backend: str) -> Service:
        folder.mkdir()
        pool = {"engine": "vllm", "backends": [{"url": backend}], "retries": {"attempts": 0}}
        return started(stack, folder, {"server": {"tls": self.tls}, "pools": {"p": pool}, "models": {"m": {}}})


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        yield Chain(stack, tmp_path_factory.mktemp("tls"), patch)


def test_https_on_both_sides_carries_answers_and_streams(chain: Chain) -> None:
    """Through two gateways, by OpenAI's library."""
    assert chain.outer.api.startswith("https://")
    with (
        httpx.Client(verify=chain.context) as http,
        openai.OpenAI(
            base_url=f"{chain.outer.api}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=chain.context),
        ) as client,
    ):
        for _ in range(5):
            assert client.chat.completions.create(**CHAT).choices[0].message.content
        streamed = list(client.chat.completions.create(**STREAM))
        assert streamed[-1].usage is not None
        assert streamed[-1].usage.completion_tokens == len(streamed) - 2  # the role, and the usage
        assert http.get(f"{chain.outer.api}/v1/models").status_code == 200
    assert chain.outer.metric("headrace_requests_total", outcome="ok") == 6
    chain.outer.eventually(chain.outer.settled)


def test_large_bodies_pass_through_tls(chain: Chain) -> None:
    """Some megabytes up, in many records."""
    body = CHAT | {"messages": [{"role": "user", "content": "word " * 60_000}], "metadata": {"more": "x" * 3_000_000}}
    answer = httpx.post(f"{chain.outer.api}/v1/chat/completions", json=body, verify=chain.context, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] >= 60_000


def test_a_backend_that_cannot_be_trusted_is_not_asked(chain: Chain) -> None:
    """Its certificate is of an authority that this gateway does not know: 502, or 503 after a probe; no traceback."""
    asked = chain.inner.metric("headrace_requests_total")
    answer = httpx.post(f"{chain.doubtful.api}/v1/chat/completions", json=CHAT, verify=chain.context)
    assert answer.status_code in (502, 503)
    assert answer.json()["error"]["code"] in ("upstream_error", "no_backend_available")
    assert chain.inner.metric("headrace_requests_total") == asked
    assert "Traceback" not in chain.doubtful.log.read_text()


def test_plain_http_to_the_tls_port_harms_nobody(chain: Chain) -> None:
    """The connection ends; the next client is served."""
    address = urlsplit(chain.outer.api)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{address.netloc}/v1/models")
    assert httpx.get(f"{chain.outer.api}/v1/models", verify=chain.context).status_code == 200
    assert "Traceback" not in chain.outer.log.read_text()

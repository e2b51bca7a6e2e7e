"""What is counted of embeddings, rerank, audio and images: work whose answer is not made of tokens."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.exchange import Exchange
from gateway.metrics import BYTES, Family, Histogram


class OneShotMetrics:
    """Distributions by model and endpoint."""

    def __init__(self) -> None:
        labels = ("model", "endpoint")
        text = "of embeddings, rerank, audio, images and other endpoints that make no tokens."
        self.seconds = Histogram("headrace_oneshot_seconds", f"From accept to the last byte, {text}", *labels)
        self.sent = Histogram("headrace_oneshot_request_bytes", f"Request bodies {text}", *labels, bounds=BYTES)
        self.answered = Histogram("headrace_oneshot_response_bytes", f"Answers {text}", *labels, bounds=BYTES)

    def metrics(self) -> Iterator[Family]:
        """All of them."""
        yield from (self.seconds, self.sent, self.answered)

    def count(self, x: Exchange, model: str) -> None:
        """A request has ended."""
        key = (model, x.endpoint.path)
        self.seconds.child(key).observe(x.ended_at - x.received_at)
        if x.call is not None:
            self.sent.child(key).observe(x.call.length)
        if not x.fault:
            self.answered.child(key).observe(x.bytes_out or (x.meter.bytes_in if x.meter is not None else 0))

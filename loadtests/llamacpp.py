"""llama.cpp's own server, from the `xllamacpp` wheel: a real engine without a GPU.

python -m loadtests.llamacpp model.gguf --name smollm2      # announces its address as JSON, until it is ended
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HTTP_THREADS = 64  # each open stream holds one


@contextmanager
def serving(
    model: Path, name: str, *, slots: int = 4, context_tokens: int = 8192, threads: int = 1, embeddings: bool = False
) -> Iterator[str]:
    """The URL of a server in this process that serves a GGUF file under `name`, on a free port, until the block ends.

    `slots` requests run at a time, each with `context_tokens` of context, on `threads` cores: on more than are idle it
    is slower by orders of magnitude, for its threads wait for each other spinning. With `embeddings` it gives nothing
    else.
    Raises ModuleNotFoundError where the wheel is missing, RuntimeError where the model cannot be used.
    """
    import xllamacpp  # an optional dependency

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {name}
    params.n_parallel = slots
    params.n_ctx = slots * context_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_threads_http = HTTP_THREADS
    params.port = 0
    params.embedding = embeddings
    if embeddings:
        params.pooling_type = (
            xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
        )  # a model of text has none of its own
    params.endpoint_metrics = True
    params.ui = False
    params.verbosity = 1  # errors
    server = xllamacpp.Server(params)
    try:
        yield server.listening_address
    finally:
        del server  # stops it


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a GGUF file by llama.cpp, on a free port.")
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--name", required=True, help="what clients call the model")
    parser.add_argument("--slots", type=int, default=4, help="requests at a time (default: 4)")
    told = parser.parse_args()
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the engine's threads are there, which inherit it
    with serving(told.model, told.name, slots=told.slots) as url:
        print(json.dumps({"url": url, "model": told.name}), flush=True)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()

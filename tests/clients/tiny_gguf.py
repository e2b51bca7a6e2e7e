"""Writes a llama model of random weights, half a megabyte small: nonsense for answers, but a real engine runs it.

    python -m tests.clients.tiny_gguf tiny.gguf

The vocabulary is that of GPT-2's byte-level BPE before it has learned anything: a token for each byte. So any text can
be asked, and its tokens are its bytes, and what the chat template puts around them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, INNER, CONTEXT = 64, 2, 4, 128, 32768
BEGIN, END = "<|begin|>", "<|end|>"
MERGED = ("\xfe", "\xff")  # llama.cpp wants one merge at least: this one is of two bytes that no UTF-8 text holds
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(path: Path, seed: int = 0) -> Path:
    """The same seed gives the same bytes."""
    tokens = [*_byte_letters(), "".join(MERGED), BEGIN, END]
    kinds = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_context_length(CONTEXT)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(INNER)
    out.add_head_count(HEADS)
    out.add_head_count_kv(HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(WIDTH // HEADS)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types(kinds)
    out.add_token_merges([" ".join(MERGED)])
    out.add_bos_token_id(tokens.index(BEGIN))
    out.add_eos_token_id(tokens.index(END))
    out.add_add_bos_token(False)
    out.add_chat_template(CHAT_TEMPLATE)
    for name, shape in _shapes(len(tokens)):
        out.add_tensor(name, _weights(np.random.default_rng((seed, len(name), *name.encode())), shape))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it is printable, one from above 255 where it is not."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _shapes(vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (vocabulary, WIDTH)
    yield "output.weight", (vocabulary, WIDTH)
    yield "output_norm.weight", (WIDTH,)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"blk.{layer}.{name}.weight", (WIDTH, WIDTH)
        yield f"blk.{layer}.attn_norm.weight", (WIDTH,)
        yield f"blk.{layer}.ffn_norm.weight", (WIDTH,)
        yield f"blk.{layer}.ffn_gate.weight", (INNER, WIDTH)
        yield f"blk.{layer}.ffn_up.weight", (INNER, WIDTH)
        yield f"blk.{layer}.ffn_down.weight", (WIDTH, INNER)


def _weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Norms are one; anything else is scaled so that it neither fades nor grows from layer to layer."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


if __name__ == "__main__":
    write(Path(sys.argv[1]))

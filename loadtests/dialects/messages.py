"""Anthropic messages, as vLLM serves them: named events, no [DONE], input tokens first and output tokens last."""

from __future__ import annotations

from loadtests.asks import Json
from loadtests.dialects.shape import Answer, escaped, named, parsed
from loadtests.speech import Usage

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """One message with one block: text, or the use of the tool that was forced."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tool = answer.ask.tool
        self.speech = answer.speeches[0]
        delta = '"input_json_delta","partial_json":"' if self.tool else '"text_delta","text":"'
        head = 'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":'
        self.before = (head + delta).encode()

    def message(self, content: list[Json], stop: str | None, usage: Json) -> Json:
        return {
            "id": f"chatcmpl-{self.answer.number}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.answer.ask.model,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": usage,
        }

    def begin(self, usage: Usage) -> bytes:
        message = self.message([], None, {"input_tokens": usage.prompt, "output_tokens": 0})
        return named("message_start", {"type": "message_start", "message": message})

    def first(self, choice: int) -> bytes:
        start = {"type": "content_block_start", "content_block": self.block(""), "index": 0}
        return named("content_block_start", start)

    def block(self, text: str) -> Json:
        if self.tool is None:
            return {"type": "text", "text": text}
        block = {"type": "tool_use", "id": f"toolu_{self.answer.number}", "name": self.tool[0]}
        return {**block, "input": parsed(text) or {}}

    def token(self, choice: int, k: int) -> bytes:
        text = self.speech.token(k)
        delta = self.before + escaped(text) + b'"},"index":0}\n\n' if text else b""
        if k < self.speech.length - 1:
            return delta
        return delta + named("content_block_stop", {"type": "content_block_stop", "index": 0})

    def usage(self, usage: Usage) -> Json:
        cached = {"cache_creation_input_tokens": usage.created, "cache_read_input_tokens": usage.cached}
        return {"input_tokens": usage.prompt, "output_tokens": usage.output, **cached}

    def end(self, usage: Usage) -> bytes:
        delta = {"stop_reason": STOP_REASONS[self.speech.finish], "stop_sequence": None}
        last = {"type": "message_delta", "delta": delta, "usage": self.usage(usage)}
        return named("message_delta", last) + named("message_stop", {"type": "message_stop"})

    def whole(self, usage: Usage) -> Json:
        block = self.block(self.speech.text())
        return self.message([block], STOP_REASONS[self.speech.finish], self.usage(usage))

    def error(self, message: str, kind: str, status: int) -> bytes:
        return named("error", {"type": "error", "error": {"type": "api_error", "message": message}})

"""The Responses API: numbered, named events around one output item, a message or the call of a forced function."""

from __future__ import annotations

from loadtests.asks import Json
from loadtests.dialects.shape import Answer, named
from loadtests.speech import Usage

# What vLLM says of a response beside what this one is about.
FIXED: Json = {
    "instructions": None,
    "metadata": None,
    "object": "response",
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "kv_transfer_params": None,
    "ec_transfer_params": None,
    "input_messages": None,
    "output_messages": None,
}


class Responses:
    """One response."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tool = answer.ask.tool
        self.speech = answer.speeches[0]
        self.item_id = f"{'fc' if self.tool else 'msg'}_{answer.number}"
        self.sequence = -1

    def event(self, kind: str, **fields: object) -> bytes:
        self.sequence += 1
        return named(kind, {**fields, "sequence_number": self.sequence, "type": kind})

    def response(self, status: str, output: list[Json], usage: Json | None) -> Json:
        raw = self.answer.ask.raw
        cut = status == "incomplete"
        return {
            **FIXED,
            "id": f"resp_{self.answer.number}",
            "created_at": self.answer.created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.answer.ask.model,
            "output": output,
            "tool_choice": raw.get("tool_choice", "auto" if raw.get("tools") else "none"),
            "tools": raw.get("tools") or [],
            "max_output_tokens": self.answer.ask.max_tokens,
            "status": status,
            "usage": usage,
        }

    def part(self, text: str) -> Json:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def item(self, text: str | None) -> Json:
        """The output item: complete with its text, or just begun (None)."""
        status = "in_progress" if text is None else "completed"
        if self.tool is not None:
            call = {"name": self.tool[0], "arguments": text or "", "call_id": f"call_{self.answer.number}"}
            return {"id": self.item_id, **call, "type": "function_call", "status": status}
        content = [] if text is None else [self.part(text)]
        message = {"role": "assistant", "status": status, "type": "message", "phase": None}
        return {"id": self.item_id, "content": content, **message}

    def begin(self, usage: Usage) -> bytes:
        response = self.response("in_progress", [], None)
        return self.event("response.created", response=response) + self.event("response.in_progress", response=response)

    def first(self, choice: int) -> bytes:
        added = self.event("response.output_item.added", item=self.item(None), output_index=0)
        if self.tool is not None:
            return added
        part = {**self.part(""), "logprobs": []}
        return added + self.event(
            "response.content_part.added", content_index=0, item_id=self.item_id, output_index=0, part=part
        )

    def token(self, choice: int, k: int) -> bytes:
        text = self.speech.token(k)
        if not text:
            return b""
        if self.tool is not None:
            return self.event(
                "response.function_call_arguments.delta", delta=text, item_id=self.item_id, output_index=0
            )
        return self.event(
            "response.output_text.delta",
            content_index=0,
            delta=text,
            item_id=self.item_id,
            logprobs=[],
            output_index=0,
        )

    def end(self, usage: Usage) -> bytes:
        text = self.speech.text()
        at: Json = {"item_id": self.item_id, "output_index": 0}
        if self.tool is not None:
            done = self.event("response.function_call_arguments.done", arguments=text, name=self.tool[0], **at)
        else:
            at["content_index"] = 0
            done = self.event("response.output_text.done", logprobs=[], text=text, **at)
            done += self.event("response.content_part.done", part=self.part(text), **at)
        done += self.event("response.output_item.done", item=self.item(text), output_index=0)
        # vLLM ends with this event also when the response is incomplete.
        return done + self.event("response.completed", response=self.whole(usage))

    def whole(self, usage: Usage) -> Json:
        status = "incomplete" if self.speech.finish == "length" else "completed"
        cache = {"cached_tokens": usage.cached, "cache_write_tokens": usage.created}
        counted = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {**cache, "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
            "output_tokens": usage.output,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": usage.prompt + usage.output,
        }
        return self.response(status, [self.item(self.speech.text())], counted)

    def error(self, message: str, kind: str, status: int) -> bytes:
        return self.event("error", code=str(status), message=message, param=None)

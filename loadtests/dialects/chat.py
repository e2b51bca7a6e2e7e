"""Chat completions, with text or one forced tool call."""

from __future__ import annotations

from loadtests.asks import Json
from loadtests.dialects.shape import DONE, FINGERPRINT, Answer, data, encoded, escaped
from loadtests.speech import Usage


class Chat:
    """One chat completion. The bytes around a token are made once: 500 streams at 50 tokens/s leave 40 us for each."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tool = answer.ask.tool
        self.id = f"chatcmpl-{answer.number}"
        self.call_id = f"chatcmpl-tool-{answer.number}"
        self.head = self.chunk_head()
        field = b'"tool_calls":[{"index":0,"function":{"arguments":"' if self.tool else b'"content":"'
        self.closes = b'"}}]' if self.tool else b'"'
        self.before = [
            b'data: %b"choices":[{"index":%d,"delta":{%b' % (self.head, choice, field)
            for choice in range(len(answer.speeches))
        ]
        self.after = self.closes + b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'

    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def chunk_head(self) -> bytes:
        fixed = {"id": self.id, "object": self.chunk_kind(), "created": self.answer.created}
        return encoded({**fixed, "model": self.answer.ask.model})[:-1] + b","

    def begin(self, usage: Usage) -> bytes:
        return b""

    def first(self, choice: int) -> bytes:
        delta: Json = {"role": "assistant", "content": ""}
        opened = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        role = self.event({"choices": [opened], "prompt_token_ids": None, "prompt_text": None})
        if self.tool is None:
            return role
        function = {"name": self.tool[0], "arguments": ""}
        call = {"id": f"{self.call_id}-{choice}", "type": "function", "index": 0, "function": function}
        delta = {"tool_calls": [call]}
        opened = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
        return role + self.event({"choices": [opened]})

    def token(self, choice: int, k: int) -> bytes:
        speech = self.answer.speeches[choice]
        text = escaped(speech.token(k)) if self.tool else speech.token(k).encode()
        if k < speech.length - 1:
            return self.before[choice] + text + self.after
        finish = b'},"logprobs":null,"finish_reason":"%b","stop_reason":null,"token_ids":null}]}\n\n'
        return self.before[choice] + text + self.closes + finish % speech.finish.encode()

    def end(self, usage: Usage) -> bytes:
        if not self.answer.ask.include_usage:
            return DONE
        return self.event({"choices": [], "usage": usage.chat(), "system_fingerprint": FINGERPRINT}) + DONE

    def event(self, rest: Json) -> bytes:
        return b"data: %b%b\n\n" % (self.head, encoded(rest)[1:])

    def whole(self, usage: Usage) -> Json | bytes:
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.answer.created,
            "model": self.answer.ask.model,
            "choices": [self.choice(index) for index in range(len(self.answer.speeches))],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage.chat(),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": None,
        }

    def choice(self, index: int) -> Json:
        speech = self.answer.speeches[index]
        text = speech.text()
        message: Json = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, "tool_calls": [], "reasoning": None}
        if self.tool is not None:
            function = {"name": self.tool[0], "arguments": text}
            call = {"id": f"{self.call_id}-{index}", "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        ending = {"logprobs": None, "finish_reason": speech.finish, "stop_reason": None, "token_ids": None}
        return {"index": index, "message": message, **ending}

    def error(self, message: str, kind: str, status: int) -> bytes:
        return data({"error": {"message": message, "type": kind, "param": None, "code": status}}) + DONE


class Completion(Chat):
    """A text completion: the same stream without roles and tools, and with its text in the open."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.id = f"cmpl-{answer.number}"
        self.head = self.chunk_head()
        choices = range(len(answer.speeches))
        self.before = [b'data: %b"choices":[{"index":%d,"text":"' % (self.head, choice) for choice in choices]
        self.after = self.text_end(b"null")

    def chunk_kind(self) -> str:
        return "text_completion"

    def text_end(self, finish: bytes) -> bytes:
        return b'","logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":null}]}\n\n' % finish

    def first(self, choice: int) -> bytes:
        return b""

    def token(self, choice: int, k: int) -> bytes:
        speech = self.answer.speeches[choice]
        after = self.after if k < speech.length - 1 else self.text_end(b'"%b"' % speech.finish.encode())
        return self.before[choice] + speech.token(k).encode() + after

    def whole(self, usage: Usage) -> Json | bytes:
        head = {"id": self.id, "object": "text_completion", "created": self.answer.created}
        choices = [self.choice(index) for index in range(len(self.answer.speeches))]
        return {**head, "model": self.answer.ask.model, "choices": choices, "usage": usage.chat()}

    def choice(self, index: int) -> Json:
        speech = self.answer.speeches[index]
        ending = {"logprobs": None, "finish_reason": speech.finish, "stop_reason": None, "prompt_logprobs": None}
        return {"index": index, "text": speech.text(), **ending}

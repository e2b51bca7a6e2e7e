"""One request in the engine: its sequences, what has been said, and the reply that it is said to."""

from __future__ import annotations

from loadtests import prose
from loadtests.dialects.shape import Answer, Dialect, encoded
from loadtests.engine import Sequence as EngineSequence
from loadtests.httpd import JSON, Reply
from loadtests.live import LiveEngine
from loadtests.speech import DIGESTED_TOKENS, Speech, Usage

PLAIN = b"text/plain; charset=utf-8"


def sequence(live: LiveEngine, prompt: bytes, speech: Speech, salt: str | None) -> EngineSequence:
    """What the engine is to work on: the prompt and the answer, both known by content."""
    digested = prompt + speech.rendered(DIGESTED_TOKENS)
    tokens = prose.token_count(prompt)
    return EngineSequence(
        live.next_id(),
        tokens,
        speech.length,
        digests=prose.digests(digested),
        digested_tokens=prose.token_count(digested),
        salt=salt,
    )


class Choice:
    """One sequence's voice."""

    __slots__ = ("generation", "index", "said")

    def __init__(self, generation: Generation, index: int) -> None:
        self.generation, self.index = generation, index
        self.said = 0

    def token(self, sequence: EngineSequence) -> None:
        k = self.said
        self.said = k + 1
        self.generation.token(self.index, k, sequence)

    def finished(self, sequence: EngineSequence) -> str:
        return self.generation.ended(self.index)


class Generation:
    """An answer in progress. It owns its sequences: they leave the engine when the client does."""

    def __init__(
        self, answer: Answer, dialect: Dialect, reply: Reply, live: LiveEngine, *, stream: bytes | None
    ) -> None:
        """`stream` is the content type of an answer that is sent as it comes, None for one that is sent whole."""
        self.answer, self.dialect, self.reply, self.live = answer, dialect, reply, live
        self.streamed = stream is not None
        self.usage = Usage(prompt=sum(map(prose.token_count, answer.ask.prompts)))
        self.open = len(answer.speeches)
        self.begun = False
        prompts = [prompt for prompt in answer.ask.prompts for _ in range(answer.ask.n)]
        self.sequences = [
            sequence(live, prompt, speech, answer.ask.salt)
            for prompt, speech in zip(prompts, answer.speeches, strict=True)
        ]
        if stream is not None:
            reply.error = dialect.error
            reply.begin(kind=stream)
        reply.on_gone = self.cancel

    def start(self) -> None:
        """Enter the engine. Raises ValueError, with nothing submitted, if the engine could never run it."""
        for index, each in enumerate(self.sequences):
            self.live.submit(each, Choice(self, index))

    def cancel(self) -> None:
        for each in self.sequences:
            self.live.cancel(each)

    def token(self, index: int, k: int, sequence: EngineSequence) -> None:
        usage = self.usage
        usage.output += 1
        if k == 0 and index % self.answer.ask.n == 0:
            usage.cached += sequence.cached_tokens
            full = sequence.prompt_tokens // prose.BLOCK_TOKENS * prose.BLOCK_TOKENS
            usage.created += max(0, full - sequence.cached_tokens)
        if not self.streamed:
            return
        opening = b""
        if k == 0:
            opening = (b"" if self.begun else self.dialect.begin(usage)) + self.dialect.first(index)
            self.begun = True
        self.reply.send(opening + self.dialect.token(index, k))

    def ended(self, index: int) -> str:
        self.open -= 1
        if not self.open:
            self.reply.on_gone = None
            if self.streamed:
                self.reply.send(self.dialect.end(self.usage))
                self.reply.end()
            else:
                found = self.dialect.whole(self.usage)
                plain = isinstance(found, bytes)
                self.reply.whole(200, found if isinstance(found, bytes) else encoded(found), PLAIN if plain else JSON)
        return "length" if self.answer.speeches[index].finish == "length" else "stop"

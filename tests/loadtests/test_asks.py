"""Reading requests: whatever JSON comes, it is an ask or an error that the client is told, never a crash."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests import prose
from loadtests.asks import InvalidAsk
from loadtests.dialects.shape import Answer, encoded
from loadtests.emulator import GENERATING, ONE_SHOT, PLACES, Emulator, Settings
from loadtests.oneshot import spoken
from loadtests.speech import Usage

NAMES = (
    "messages prompt input content role type text tools tool_choice function name parameters properties items enum "
    "max_tokens max_completion_tokens max_output_tokens min_tokens n stream stream_options include_usage system query "
    "documents top_n text_1 text_2 tokens cache_salt seed temperature dimensions encoding_format instructions "
    "ignore_eos"
).split()
WORDS = st.sampled_from(["m", "user", "assistant", "text", "object", "string", "function", "auto", "required", "é", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": WORDS, "content": VALUES}), max_size=3)
DOCUMENTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(Settings(max_model_len=2000))


def answered(emulator: Emulator, path: str, raw: dict[str, Any]) -> None:
    """All that happens to a request but the engine."""
    if path in PLACES:
        encoded(emulator.count(path, raw))
        return
    if path in GENERATING:
        reader, dialect = GENERATING[path]
        ask = emulator.read(reader, raw)
        speeches = [emulator.speaker.answer(ask, prompt, i) for prompt in ask.prompts for i in range(ask.n)]
    else:
        task = emulator.read(ONE_SHOT[path], raw)
        ask, dialect, speeches = task.ask, task.dialect, spoken(task, emulator.speaker.corpus.tokens)
    words = dialect(Answer("0", 0, ask, speeches))
    stream = words.begin(Usage()) + words.first(0) + words.token(0, 0) + words.end(Usage())
    assert isinstance(stream, bytes)
    whole = words.whole(Usage())
    assert isinstance(whole, bytes) or encoded(whole)


@pytest.mark.parametrize(
    "path", [*GENERATING, "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/audio/speech", *PLACES]
)
@settings(max_examples=60, deadline=None)
@given(raw=DOCUMENTS, messages=st.none() | MESSAGES)
def test_any_json_is_an_ask_or_a_refusal(emulator: Emulator, path: str, raw: dict[str, Any], messages: Any) -> None:
    """Nothing but InvalidAsk is raised on the way to an answer."""
    if messages is not None:
        raw["messages"] = messages
    try:
        answered(emulator, path, raw)
    except InvalidAsk as refused:
        assert refused.status in (400, 404)


@given(text=st.text())
def test_tokens_are_the_text(text: str) -> None:
    """What is rendered comes back, without the filling; NUL is the filling."""
    clean = text.replace("\0", "")
    assert prose.text_of(prose.token_ids(prose.padded(clean.encode()))) == clean


@given(head=st.binary(min_size=64, max_size=400), one=st.binary(max_size=100), two=st.binary(max_size=100))
def test_digests_agree_as_far_as_the_texts_do(head: bytes, one: bytes, two: bytes) -> None:
    """Equal leading blocks have equal digests; from the first block that differs on, none is equal."""
    left, right = prose.digests(head + one), prose.digests(head + two)
    pairs = zip(head + one, head + two, strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(head + one), len(head + two)))
    same = common // prose.BLOCK_BYTES
    assert left[:same] == right[:same]
    assert all(a != b for a, b in zip(left[same:], right[same:], strict=False))

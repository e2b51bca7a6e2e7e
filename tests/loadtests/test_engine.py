"""The engine model against a slow oracle, against itself in one leap, and against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.engine import Engine, Sequence, Step
from loadtests.profiles import MS, NS, PROFILES, US, Profile, S
from tests.loadtests.plain_engine import PlainEngine

TINY = Profile("tiny", 10 * MS, 40 * US, 2356, 49 * NS, 2 * MS, 16 * 40)
SMALL = replace(TINY, kv_tokens=16 * 22)  # so little memory that preemption and eviction are common
CHUNK, MAX_SEQS = 48, 6

requests = st.tuples(
    st.integers(0, 2),  # which of three prompts it begins like
    st.integers(0, 12),  # for how many blocks
    st.integers(1, 60),  # tokens beyond
    st.integers(1, 80),
    st.sampled_from([None, None, "a"]),
)
runs = st.integers(1, 400).map(lambda ms: ("run", ms))
cancels = st.integers(0, 30).map(lambda i: ("cancel", i))
actions = st.lists(st.one_of(requests, requests, requests, runs, runs, cancels), min_size=10, max_size=60)


def sequence(name: int, family: int, shared: int, extra: int, out: int, salt: str | None) -> Sequence:
    """Its first blocks have the digests of the family, the full blocks beyond are its own."""
    prompt = 16 * shared + extra
    digests = [(family, i) if i < shared else (name, i) for i in range(prompt // 16)]
    return Sequence(name, prompt, out, digests, salt=salt)


def state(engine: Engine) -> object:
    pool = engine.pool
    return (
        (engine.clock_ps, engine.steps, engine.waiting, engine.running, sorted(engine.decoding), repr(pool)),
        (engine.prompt_tokens, engine.generated_tokens, engine.prefix_queries, engine.prefix_hits, engine.preemptions),
        [(piece.blocks, piece.key) for piece in pool._lru],
    )


def seen(steps: list[Step]) -> list[object]:
    """All that a caller can see of the steps: who did what, and when."""
    return [
        (step.end_ps, *([s.id for s in group] for group in (step.first, step.finished, step.preempted)))
        for step in steps
        if step.first or step.finished or step.preempted
    ]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions)
def test_agrees_with_the_plain_engine(script: list[tuple]) -> None:
    """Durations, first tokens, endings, preemptions, cache hits and memory are those of the block-by-block model."""
    engine = Engine(SMALL, chunk=CHUNK, max_seqs=MAX_SEQS)
    plain = PlainEngine(SMALL, CHUNK, engine.pool.total, MAX_SEQS)
    for name, action in enumerate(script):
        match action:
            case ("run", ms):
                for _ in range(ms // 10):
                    if not engine.idle:
                        step = engine.step()
                        assert (step.end_ps - step.start_ps, *ids(step)) == plain.step()
                        assert all(other.cached == other.request.cached_tokens for other in plain.running)
                        held = {block for other in plain.running for block in other.blocks}
                        assert engine.pool.held == len(held)
            case ("cancel", target):
                engine.cancel(target)
                plain.cancel(target)
            case _:
                request = sequence(name, *action)
                engine.submit(request)
                plain.submit(request)


def ids(step: Step) -> tuple[list[object], ...]:
    return tuple([sequence.id for sequence in group] for group in (step.first, step.finished, step.preempted))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions)
def test_one_leap_is_many_steps(script: list[tuple]) -> None:
    """`advance` ends in exactly the state of single steps, and shows the same things at the same times."""
    leaping, stepping = (Engine(SMALL, chunk=CHUNK, max_seqs=MAX_SEQS) for _ in range(2))
    until = 0
    for name, action in enumerate(script):
        match action:
            case ("run", ms):
                until += ms * MS
                single = []
                while stepping.clock_ps < until and not stepping.idle:
                    single.append(stepping.step())
                leaps = leaping.advance(until)
                if stepping.idle:
                    assert stepping.advance(until) == []
                assert seen(leaps) == seen(single)
                assert sum(leap.steps for leap in leaps) == len(single)
            case ("cancel", target):
                assert leaping.cancel(target) == stepping.cancel(target)
            case _:
                leaping.submit(sequence(name, *action))
                stepping.submit(sequence(name, *action))
        assert state(leaping) == state(stepping)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(actions)
def test_nothing_shows_before_the_time_to_wake(script: list[tuple]) -> None:
    """Until `wake_ps` an undisturbed engine only decodes; the step that starts there is run by `advance(wake + 1)`."""
    engine = Engine(SMALL, chunk=CHUNK, max_seqs=MAX_SEQS)
    for name, action in enumerate(script):
        match action:
            case ("run", _):
                wake = engine.wake_ps()
                if wake is not None:
                    assert seen(engine.advance(wake)) == []
                    assert engine.clock_ps == wake
                    assert engine.advance(wake + 1)
            case ("cancel", target):
                engine.cancel(target)
            case _:
                engine.submit(sequence(name, *action))


def test_one_request_by_hand() -> None:
    """100 tokens in chunks of 48, then 2 more tokens: five steps, each to the picosecond."""
    engine = Engine(TINY, chunk=48, max_seqs=4)
    engine.submit(Sequence("a", 100, 3))
    fixed = 2 * MS + 4400 * NS
    expected = [
        (10 * MS + 2356 * 48 * 48 // 2 + fixed, (), ()),
        (10 * MS + 2356 * 48 * (96 + 48) // 2 + fixed, (), ()),
        (10 * MS + 2356 * 4 * (192 + 4) // 2 + fixed, ("a",), ()),
        (10 * MS + 49 * NS * 100 + fixed, (), ()),
        (10 * MS + 49 * NS * 101 + fixed, (), ("a",)),
    ]
    for duration, first, finished in expected:
        step = engine.step()
        assert step.end_ps - step.start_ps == duration
        assert (tuple(s.id for s in step.first), tuple(s.id for s in step.finished)) == (first, finished)
    assert engine.idle
    assert (engine.generated_tokens, engine.prompt_tokens, engine.steps) == (3, 100, 5)
    assert engine.pool.held == 0


def test_isolated_prefill_is_what_the_engine_takes() -> None:
    """`prefill_ps` is the time to the first token on an idle engine, whatever is cached."""
    profile = PROFILES["qwen3-32b-h100"]
    engine = Engine(profile)
    for name, cached in (("cold", 0), ("warm", 9984)):
        start = engine.clock_ps
        engine.submit(Sequence(name, 10_000, 1, [("d", i) for i in range(625)]))
        while not engine.idle:
            engine.step()
        assert engine.clock_ps - start == profile.prefill_ps(10_000, 2048, cached)
    assert 0.38 < profile.prefill_ps(8192, 8192) / S < 0.42  # measured: 0.40 s


def test_at_most_all_but_the_last_token_is_reused() -> None:
    """A prompt of whole blocks seen before computes its last block again, or it would have nothing to sample from."""
    engine = Engine(TINY, chunk=48, max_seqs=4)
    for name in ("a", "b"):
        request = Sequence(name, 64, 1, ["w", "x", "y", "z"])
        engine.submit(request)
        while not engine.idle:
            engine.step()
    assert request.cached_tokens == 48


def test_salt_separates() -> None:
    """The same digests under another salt are another prompt."""
    engine = Engine(TINY, chunk=48, max_seqs=4)
    cached = []
    for name, salt in enumerate(["a", "b", "a", None]):
        request = Sequence(name, 40, 1, ["x", "y"], salt=salt)
        engine.submit(request)
        engine.advance(engine.clock_ps + S)
        cached.append(request.cached_tokens)
    assert cached == [0, 0, 32, 0]


def test_answers_are_cached_when_they_have_digests() -> None:
    """The next turn of a conversation hits the prompt and the answer of the turn before."""
    engine = Engine(TINY, chunk=48, max_seqs=4)
    engine.submit(Sequence(1, 32, 33, ["a", "b", "c", "d"], digested_tokens=64))
    engine.advance(S)
    second = Sequence(2, 80, 1, ["a", "b", "c", "d", "e"])
    assert engine.match(second) == 64
    engine.submit(second)
    engine.step()
    assert second.cached_tokens == 64


def test_pieces_of_many_blocks_are_evicted_from_their_end() -> None:
    """A 512-token piece loses its last blocks first, and what remains of it still counts."""
    engine = Engine(replace(TINY, kv_tokens=16 * 40), chunk=2048, max_seqs=4)
    engine.submit(Sequence("long", 512, 1, ["piece"], 512))
    engine.step()
    engine.submit(Sequence("other", 160, 1))
    engine.step()
    assert engine.match(Sequence("again", 513, 1, ["piece"], 512)) == 480


def test_refuses_what_could_never_run() -> None:
    """Too long, empty, or a second one of the same id: a ValueError that names the sequence."""
    engine = Engine(TINY, chunk=48, max_seqs=4)
    engine.submit(Sequence("a", 10, 1))
    for bad in (Sequence("b", 640, 1), Sequence("b", 0, 1), Sequence("b", 1, 0), Sequence("a", 1, 1)):
        with pytest.raises(ValueError, match=repr(bad.id)):
            engine.submit(bad)
    with pytest.raises(ValueError, match="digest_tokens"):
        engine.submit(Sequence("b", 10, 1, digest_tokens=10))
    with pytest.raises(ValueError, match="chunk"):
        Engine(TINY, chunk=256)


def test_a_step_costs_the_same_for_any_batch() -> None:
    """Decode-only steps touch sums, not sequences: the operations per step do not grow with the batch."""

    class Counting(dict):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, key: object) -> object:
            Counting.reads += 1
            return super().__getitem__(key)

        def __iter__(self) -> object:
            raise AssertionError("a step walked over the batch")

    engine = Engine(PROFILES["llama-3-8b-h100"], max_seqs=500)
    for name in range(400):
        engine.submit(Sequence(name, 16, 2000))
    while engine.waiting:
        engine.step()
    engine._batch.members = Counting(engine._batch.members)
    engine._running = Counting(engine._running)
    for _ in range(100):
        assert engine.step().batch == 400
    assert engine.advance(engine.clock_ps + S)[0].steps > 50
    assert Counting.reads == 0

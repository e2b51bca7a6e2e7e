"""YAML with positions: every way a file can be unreadable has a place and a fix, and nothing makes it explode."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import yamlfile
from gateway.problem import ConfigError
from gateway.yamlfile import compose, read_text

STEADY = settings(deadline=None, derandomize=True)

UNREADABLE = {
    "": "f: is empty: it needs pools and models",
    "# only a comment\n": "f: is empty: it needs pools and models",
    "---\n~\n": "f: is empty: it needs pools and models",
    "- a\n- b\n": "f:1:1: keys were expected at the top: pools:, models: ...",
    "just text": "f:1:1: keys were expected at the top: pools:, models: ...",
    "a:\n\tb: 1\n": "f:2:1: this is not YAML: a tab cannot indent: use spaces",
    "a: b: c": "f:1:5: this is not YAML: a `: ` where no key can stand: quote the text, or mend the indentation",
    "a: @x": "f:1:4: this is not YAML: a text that begins with this character needs quotes",
    "a: [1,\nb: 2": "f:2:5: this is not YAML: while parsing a flow sequence from line 1: "
    "expected ',' or ']', but got '<stream end>'",
    "a: 'x": "f:1:6: this is not YAML: while scanning a quoted scalar from line 1: found unexpected end of stream",
    "a:\n  b: 1\n c: 2": "f:3:2: this is not YAML: while parsing a block mapping from line 1: "
    "expected <block end>, but found '<block mapping start>'",
    "a: 1\n---\nb: 2\n": "f:2:1: a second document starts here: keep one",
    "a: \x01": "f:1:4: a character that YAML allows only escaped, in double quotes",
    "a: *sk-live-1": "f:1:4: a: this alias has no anchor (a text that begins with * needs quotes)",
    "a: &x [1, *x]": "f:1:11: a[1]: this alias stands inside the value that it repeats",
    'a: "\\UFFFFFFFF"': "f: this is not YAML: an escape or a %YAML directive is out of range",
    "%YAML " + "1" * 5000 + ".1\n---\na: 1": "f: this is not YAML: an escape or a %YAML directive is out of range",
    "a: " + "[" * 50: "f:1:24: a[0][0]: nested more than 20 levels deep",
    "- " * 5000: "f:1:43: [0][0][0]: nested more than 20 levels deep",
}
STEPPED_OVER = {
    "a: 1\nb: 2\na: 3": ["f:3:1: a: this key stands on line 1 already: keep one"],
    "a: {b: 1, c: 2, 'b': 3}": ["f:1:17: a.b: this key stands on line 1 already: keep one"],
    "a: !!python/object:os.system x": ["f:1:4: a: tags (!...) are not used here: write the plain value"],
    "a: !secret {b: 1}": ["f:1:4: a: tags (!...) are not used here: write the plain value"],
    "? [a, b]\n: c": ["f:1:3: a key must be a single text"],
    "a: {<<: b}": ["f:1:5: a: << takes an alias of a mapping, or a list of them: <<: *defaults"],
    'a: "\\ud800"': ["f:1:4: a: half a character: a surrogate stands alone"],
    '"a.b c": {x: 1, x: 2}': ['f:1:17: "a.b c".x: this key stands on line 1 already: keep one'],
    "é: 1\né: 2\na: 1\na: 2": [
        "f:2:1: é: this key stands on line 1 already: keep one",
        "f:4:1: a: this key stands on line 3 already: keep one",
    ],
}


@pytest.mark.parametrize(("text", "report"), UNREADABLE.items(), ids=lambda text: repr(text[:20]))
def test_unreadable_text_has_a_place_and_a_reason(text: str, report: str) -> None:
    """One problem, on the right line, in words that say what to do."""
    with pytest.raises(ConfigError) as caught:
        compose(text, "f")
    assert str(caught.value) == report


@pytest.mark.parametrize(("text", "report"), STEPPED_OVER.items(), ids=lambda text: repr(text)[:20])
def test_other_faults_are_all_reported(text: str, report: list[str]) -> None:
    """Duplicate keys with both lines, tags, keys that are no texts: noted, and the reading goes on."""
    _, problems = compose(text, "f")
    assert [str(problem) for problem in problems] == report


def test_scalars_stay_text_and_null_is_empty() -> None:
    """YAML's own guesses (booleans, dates, octal and base 60 numbers) are not made."""
    root, problems = compose("{on: off, 2024-10-01: 0x10, t: 1:30, 1e3: null, n: ~, q: 'null', e: }", "f")
    assert not problems
    assert root.plain() == {"on": "off", "2024-10-01": "0x10", "t": "1:30", "1e3": "", "n": "", "q": "null", "e": ""}


def test_anchors_aliases_and_merges_work() -> None:
    """A key of one's own wins over merged ones, the first merged mapping over the next."""
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], x: 5}\nd: *a\ne:\n  <<: *b\n  w: 6\n"
    root, problems = compose(text, "f")
    assert not problems
    plain = root.plain()
    assert plain["c"] == {"x": "5", "y": "2", "z": "4"}
    assert plain["d"] == {"x": "1", "y": "2"}
    assert plain["e"] == {"w": "6", "y": "3", "z": "4"}


def test_positions_lead_to_the_key_or_item_or_the_nearest_above() -> None:
    """Lines and columns count from 1; a byte order mark counts nothing."""
    root, _ = compose("a:\n  b:\n    - x\n    - {c: 1}\n", "f")
    assert root.position(("a", "b")) == (2, 3)
    assert root.position(("a", "b", 1)) == (4, 7)
    assert root.position(("a", "b", 1, "c")) == (4, 8)
    assert root.position(("a", "b", 7)) == (2, 3)
    assert root.position(("a", "missing", "deeper")) == (1, 1)
    assert root.position(()) == (1, 1)


BOMBS = {
    "aliases": "a0: &a0 [x]\n"
    + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 15))
    + "z: ["
    + "*a14, " * 20
    + "]",
    "merges": "a: &a {"
    + ", ".join(f"k{n}: v" for n in range(2000))
    + "}\n"
    + "".join(f"m{n}: {{<<: *a}}\n" for n in range(2000)),
    "chain of aliases": "a0: &a0 {x: y}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}}}\n" for n in range(1, 500)),
    "billion laughs": "a0: &a0 [x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 18)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_alias_bombs_are_refused_quickly(name: str) -> None:
    """Small files that expand without bound stop at a cap: values are counted at each use, and so is their depth."""
    start = time.process_time()
    cap = "more than 20 levels" if name == "chain of aliases" else "more than 300000 values"
    with pytest.raises(ConfigError, match=cap):
        compose(BOMBS[name], "f")
    assert time.process_time() - start < 5


def test_problems_never_show_the_text_around_them() -> None:
    """PyYAML's snippets and names could hold a secret."""
    for text in (
        "k: hunter2\n\tx: y",
        "k: [hunter2\nb: @",
        "k: *hunter2",
        "k: !hunter2 x",
        "k: 'hunter2",
        "k: %hunter2",
        "k: !hunter2!x y",
    ):
        try:
            _, problems = compose(text, "f")
        except ConfigError as exc:
            problems = list(exc.problems)
        assert problems
        assert "hunter2" not in "".join(map(str, problems)), text


def test_unreadable_files_are_problems(tmp_path: Path) -> None:
    """Missing, a directory, too large, not UTF-8, not a path at all."""
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (yamlfile.MAX_BYTES + 1))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: caf\xe9\n")
    wide = tmp_path / "wide.yaml"
    wide.write_bytes("a: 1".encode("utf-16"))
    for path, report in {
        tmp_path / "none.yaml": "cannot be read: No such file or directory",
        tmp_path: "cannot be read: Is a directory",
        tmp_path / ("x" * 300): "cannot be read: File name too long",
        Path("a\0b"): "cannot be read: this is not a path",
        big: "is larger than 1 MiB: is it the right file?",
    }.items():
        with pytest.raises(ConfigError) as caught:
            read_text(path)
        assert str(caught.value) == f"{path}: {report}"
    for path, place in {latin: "2:7", wide: "1:1"}.items():
        with pytest.raises(ConfigError) as caught:
            read_text(path)
        assert str(caught.value) == f"{path}:{place}: this is not UTF-8: save the file as UTF-8"


def test_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    """Windows editors write one."""
    path = tmp_path / "bom.yaml"
    path.write_bytes("a: 1".encode("utf-8-sig"))
    assert read_text(path) == "a: 1"


@STEADY
@given(st.text(alphabet=st.sampled_from("ab:-[]{},&*!|>'\"%@`#?<~ \n\t\\0é\u2028\x01\ud800"), max_size=60))
def test_any_text_is_a_tree_or_a_problem(text: str) -> None:
    """Nothing but ConfigError comes out, and its report is never empty."""
    try:
        root, _ = compose(text, "f")
    except ConfigError as exc:
        assert exc.problems
        assert str(exc)
    else:
        assert isinstance(root.plain(), dict)

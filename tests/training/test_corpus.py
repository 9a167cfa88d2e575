from __future__ import annotations

import ast
from pathlib import Path

import pytest

from training.corpus import chat_examples, is_held_out, load_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(200):
        folder = tmp_path / ("test" if number % 2 else "lib")
        folder.mkdir(exist_ok=True)
        (folder / f"module_{number}.py").write_text(f"value_{number} = {number}\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("other = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\xff\n")
    (tmp_path / "zz_copy.py").write_text("value_3 = 3\n")
    return tmp_path


def test_split_is_deterministic_and_disjoint(library: Path) -> None:
    first, second = load_corpus(library, fraction=0.2), load_corpus(library, fraction=0.2)
    assert first == second
    train, held_out = ({file.path for file in side} for side in (first.train, first.held_out))
    assert train
    assert held_out
    assert not train & held_out
    assert len(train | held_out) == 200
    assert 0.1 < len(held_out) / 200 < 0.3


def test_split_depends_on_the_path_alone(library: Path) -> None:
    before = {file.path for file in load_corpus(library, fraction=0.2).held_out}
    (library / "lib" / "new.py").write_text("new = 1\n")
    after = {file.path for file in load_corpus(library, fraction=0.2).held_out}
    assert after - {"lib/new.py"} == before


def test_skips_third_parties_other_encodings_and_copies(library: Path) -> None:
    corpus = load_corpus(library)
    paths = {file.path for file in (*corpus.train, *corpus.held_out)}
    assert not paths & {"site-packages/other.py", "latin.py", "zz_copy.py"}


def test_known_files_stay_held_out() -> None:
    """Published results depend on this split: a change of the hash is a change of the data."""
    assert is_held_out("multiprocessing/connection.py")
    assert is_held_out("test/test_doctest.py")
    assert not is_held_out("argparse.py")


def test_chat_examples_hold_whole_functions(tmp_path: Path) -> None:
    source = 'class A:\n    def area(self):\n        """Return the area of the shape."""\n        return 1\n'
    (tmp_path / "shapes.py").write_text(source)
    (example,) = chat_examples(load_corpus(tmp_path, fraction=0.0).train)
    assert example.user == "Write the function area: Return the area of the shape."
    assert isinstance(ast.parse(example.assistant).body[0], ast.FunctionDef)

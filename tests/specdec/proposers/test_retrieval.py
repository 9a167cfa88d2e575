"""Retrieval: what is found in a corpus, against a search of it; what is kept on disk; files at fault."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from specdec.core.errors import ConfigError
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.corpus import Corpus, open_corpus
from specdec.proposers.lookup_config import RetrievalConfig
from specdec.proposers.registry import create_proposer
from specdec.proposers.retrieval import RetrievalProposer
from specdec.proposers.suffix_array import occurrences, occurs, sorted_suffixes
from specdec.proposers.target_facts import TargetFacts
from tests.architectures import VOCAB_SIZE, make_tokenizer
from tests.specdec.proposers.contract import ProposerContract, view
from tests.specdec.proposers.retrieval_configs import config_for

TEXTS = [[1, 2, 3, 4, 5], [9, 2, 3, 4, 6, 1, 2, 3, 1, 2], [2, 3, 4, 5]]
ANY = RetrievalConfig(path="unread", min_match_tokens=1, min_token_probability=0.0)


class TestRetrievalContract(ProposerContract):
    def make_proposer(self) -> Proposer:
        return RetrievalProposer(ANY, Corpus.of_texts(TEXTS))


class TestRetrievalTreeContract(ProposerContract):
    def make_proposer(self) -> Proposer:
        return RetrievalProposer(ANY.model_copy(update={"shape": "tree"}), Corpus.of_texts(TEXTS))


@pytest.mark.parametrize("seed", range(12))
def test_every_occurrence_is_found(seed: int) -> None:
    generator = random.Random(seed)
    text = generator.choices(range(1 + seed % 4), k=generator.randint(1, 120))
    token_ids = np.array(text, dtype=np.int32)
    suffixes = sorted_suffixes(token_ids)
    assert sorted(suffixes.tolist()) == list(range(len(text)))
    assert [text[at : at + 32] for at in suffixes] == sorted(text[at : at + 32] for at in range(len(text)))
    assert not occurs(token_ids, suffixes, [9])
    for _ in range(30):
        at = generator.randrange(len(text))
        string = text[at : at + generator.randint(1, 8)]
        if generator.random() < 0.2:
            string = [*string, 7]
        found = sorted(int(suffixes[index]) for index in occurrences(token_ids, suffixes, string))
        assert bool(found) == occurs(token_ids, suffixes, string)
        assert found == [at for at in range(len(text)) if text[at : at + len(string)] == string]


@pytest.mark.parametrize("seed", range(8))
def test_the_most_frequent_token_behind_the_longest_match(seed: int) -> None:
    generator = random.Random(seed)
    texts = [generator.choices(range(4), k=generator.randint(1, 30)) for _ in range(4)]
    proposer = RetrievalProposer(ANY, Corpus.of_texts(texts))
    for _ in range(20):
        end = generator.choices(range(4), k=generator.randint(1, 12))
        one = view("a", end)
        proposal = proposer.propose([one], {one.request_id: 1}).get(one.request_id)
        for size in range(len(end), 0, -1):
            places = [(text, at + size) for text in texts for at in range(len(text) - size + 1)]
            behind = [text[to : to + 1] for text, to in places if text[to - size : to] == end[-size:]]
            if behind:
                break
        counts = Counter(token for tokens in behind for token in tokens)
        assert (proposal is None) == (not counts)
        if proposal is not None:
            assert counts[proposal.token_ids[0]] == max(counts.values())


def test_a_tree_has_the_alternatives() -> None:
    proposer = RetrievalProposer(ANY.model_copy(update={"shape": "tree"}), Corpus.of_texts(TEXTS))
    one = view("a", [8, 3, 4])
    (proposal,) = proposer.propose([one], {one.request_id: 3}).values()
    assert (proposal.token_ids, proposal.parents) == ((5, 6, 1), (-1, -1, 1))


def test_short_matches_are_left_alone() -> None:
    config = ANY.model_copy(update={"min_match_tokens": 3})
    proposer = RetrievalProposer(config, Corpus.of_texts(TEXTS))
    short, long = view("short", [7, 1, 2]), view("long", [7, 1, 2, 3])
    assert proposer.propose([short, long], {short.request_id: 4, long.request_id: 4}).keys() == {"long"}


@pytest.fixture
def model(tmp_path: Path) -> str:
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_files_of_a_folder_are_found_again(tmp_path: Path, model: str) -> None:
    folder = tmp_path / "corpus"
    (folder / "deeper").mkdir(parents=True)
    (folder / "one.txt").write_text("hello world")
    lines = [json.dumps({"body": "the end of it"}), "", json.dumps({"body": "another"})]
    (folder / "deeper" / "two.jsonl").write_text("\n".join(lines))
    config = config_for(folder, text_field="body", min_match_tokens=1)
    made, kept = open_corpus(config, model), open_corpus(config, model)
    assert made.token_ids.tolist() == kept.token_ids.tolist()
    assert made.suffixes.tolist() == kept.suffixes.tolist()
    assert not kept.suffixes.flags.owndata, "it is to be mapped, not read"
    assert len(list((tmp_path / "kept").iterdir())) == 1
    facts = TargetFacts(vocab_size=VOCAB_SIZE, dtype="float32", max_num_seqs=4, model=model)
    speculative = SpeculativeConfig.model_validate({"method": "retrieval", "retrieval": config.model_dump()})
    text = make_tokenizer()("hello world", add_special_tokens=False)["input_ids"]
    one = view("a", text[:4])
    (proposal,) = create_proposer(speculative, facts).propose([one], {one.request_id: 3}).values()
    assert list(proposal.token_ids) == text[4:7]


def test_what_is_kept_is_that_of_the_files_and_the_tokenizer(tmp_path: Path, model: str) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("hello world")
    open_corpus(config_for(path), model)
    path.write_text("hello again")
    open_corpus(config_for(path), model)
    make_tokenizer(VOCAB_SIZE - 1).save_pretrained(tmp_path / "other")
    open_corpus(config_for(path), str(tmp_path / "other"))
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_an_index_that_cannot_be_read_is_made_anew(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("hello world")
    made = open_corpus(config_for(path), model)
    (kept,) = (tmp_path / "kept").iterdir()
    (kept / "suffixes.npy").write_bytes(b"rubbish")
    assert open_corpus(config_for(path), model).suffixes.tolist() == made.suffixes.tolist()
    assert "cannot be read and is made anew" in caplog.text
    assert open_corpus(config_for(path), model).suffixes.tolist() == made.suffixes.tolist()


def test_an_index_that_cannot_be_kept_costs_a_line(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("hello world")
    (tmp_path / "file").write_text("in the way")
    made = open_corpus(config_for(path, cache_dir=str(tmp_path / "file")), model)
    assert "cannot be kept" in caplog.text
    assert open_corpus(config_for(path), model).suffixes.tolist() == made.suffixes.tolist()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "there is no text in .*empty.txt"),
        ("latin.txt", b"caf\xe9 noir", "latin.txt is not UTF-8 text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl, line 2 is not JSON"),
        ("b.jsonl", b'{"content": "a"}', "b.jsonl, line 1 has no text in its field 'text': .*text_field"),
    ],
)
def test_files_at_fault_are_named(
    tmp_path: Path, model: str, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_corpus(config_for(tmp_path / name), model)


def test_missing_things_are_named(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no file or folder .*nowhere"):
        open_corpus(config_for(tmp_path / "nowhere"), model)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError, match=r"no file in the folder .*bare"):
        open_corpus(config_for(tmp_path / "bare"), model)
    with pytest.raises(ConfigError, match=r"bare/tokenizer.json, which is missing"):
        open_corpus(config_for(tmp_path / "nowhere"), str(tmp_path / "bare"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "retrieval"}, "method retrieval needs `retrieval`, with the path of a corpus"),
        ({"retrieval": {"path": "a"}}, "no other method takes it"),
        ({"method": "retrieval", "retrieval": {"path": "a", "min_match_tokens": 20}}, "must not exceed"),
        (
            {
                "method": "retrieval",
                "retrieval": {"path": "a", "shape": "tree"},
                "rejection_sample_method": "block",
            },
            "retrieval.shape: tree: rejection_sample_method block takes chains",
        ),
    ],
)
def test_contradictions(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig.model_validate(keys)

"""Texts, rows and hidden states."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specdec.core.errors import ConfigError, ResourceError
from specdec.drafters.base import FINAL_NORM
from specdec.model.tokenizer import load_tokenizer
from tests.architectures import make_tokenizer
from training.drafters.capture import Capture, KeptStates
from training.drafters.rows import Rows
from training.drafters.texts import is_held_out, read_documents, split


class TestTexts:
    def test_every_kind_of_line(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = (
            "{% for m in messages %}[{{ {'system': 's', 'user': 'u', 'assistant': 'a'}[m['role']] }}"
            "{{ m['content'] }}]{% endfor %}"
        )
        share_gpt = [
            {"from": "system", "value": "i"},
            {"from": "human", "value": "j"},
            {"from": "gpt", "value": "k"},
        ]
        others = [{"from": name, "value": "n"} for name in ("user", "chatgpt", "bing", "bard", "assistant")]
        spec_forge = [{"role": "user", "content": "l"}, {"role": "assistant", "content": "m"}]
        lines = [
            {"text": "abc"},
            {"prompt": "de", "completion": "f"},
            {"messages": [{"role": "user", "content": "g"}, {"role": "assistant", "content": "h"}]},
            {"id": "1", "conversations": share_gpt},
            {"id": "2", "conversations": spec_forge},
            {"id": "3", "conversations": []},
            {"messages": []},
            {"id": "4", "conversations": others},
            {"id": "5", "system": "o", "conversations": share_gpt[1:]},
            {"id": "6", "system": "", "messages": spec_forge},
        ]
        (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
        (tmp_path / "a.txt").write_text("xyz")
        (tmp_path / "ignored.bin").write_bytes(b"\xff")
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / "hidden.py").write_text("no")
        with caplog.at_level(logging.WARNING):
            documents = read_documents([tmp_path], tokenizer)
        assert caplog.messages == ["--data: 2 of 11 documents have fewer than two tokens, and are left out"]
        assert [tokenizer.decode(document) for document in documents] == [
            "xyz",
            "abc",
            "def",
            "[ug][ah]",
            "[si][uj][ak]",
            "[ul][am]",
            "[un][an][an][an][an]",
            "[so][uj][ak]",
            "[ul][am]",
        ]

    def test_lines_of_json_end_at_line_feeds_alone(self, tmp_path: Path) -> None:
        """Strings may hold other characters that end lines as they are."""
        odd = "a\u2028b\u0085c\u2029d"
        lines = [{"text": odd}, {"prompt": "ef", "completion": None}]
        content = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
        (tmp_path / "a.jsonl").write_text(content, encoding="utf-8", newline="")
        tokenizer = make_tokenizer()
        wanted = tokenizer(odd, add_special_tokens=False)["input_ids"]
        first, second = read_documents([tmp_path / "a.jsonl"], tokenizer)
        assert first.tolist() == wanted
        assert tokenizer.decode(second) == "ef"

    def test_messages_that_a_template_refuses_are_named(self, tmp_path: Path) -> None:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n{"messages": [{"role": "user", "content": "c"}]}')
        with pytest.raises(ConfigError, match=r"a\.jsonl:2: .* chat template .*: roles must alternate"):
            read_documents([tmp_path / "a.jsonl"], tokenizer)

    @pytest.mark.parametrize(
        ("name", "content", "text"),
        [
            ("a.jsonl", '{"prompt": "ab", "completion": ["c"]}', r"a\.jsonl:1 must be an object with"),
            ("a.jsonl", '{"text": "ab"}\nno', r"a\.jsonl:2 is not JSON"),
            ("a.jsonl", '{"words": "ab"}', r"a\.jsonl:1 must be an object with"),
            ("a.jsonl", '{"messages": []}', "no chat template"),
            ("a.jsonl", '{"conversations": [{"from": "gpt", "value": "ab"}]}', "no chat template"),
            (
                "a.jsonl",
                '{"text": "ab"}\n'
                '{"conversations": [{"from": "gpt", "value": "c"}, {"from": "tool", "value": "d"}]}',
                r"a\.jsonl:2: conversations\[1\]\.from is 'tool'; known are human, user, gpt, assistant, sys",
            ),
            (
                "a.jsonl",
                '{"conversations": [{"from": "gpt", "content": "ab"}]}',
                r'a\.jsonl:1: conversations\[0\] must be an object with "from" and "value"',
            ),
            ("a.jsonl", '{"conversations": ["ab"]}', r"a\.jsonl:1: conversations\[0\] must be an object"),
            (
                "a.jsonl",
                '{"system": ["s"], "messages": [{"role": "user", "content": "c"}]}',
                r'a\.jsonl:1: "system" must be a string',
            ),
            ("a.txt", "", "no text in"),
            ("a.jsonl", '{"text": "ab"}\n{"text": "\\ud83d"}', r"a\.jsonl:2 has half of a surrogate pair"),
            ("a.jsonl", '{"prompt": "a", "completion": "\\udc00"}', r"a\.jsonl:1 has half of a surrogate"),
            ("a.jsonl", '{"text": ' + "1" * 5000 + "}", r"a\.jsonl:1 is not JSON"),
            ("a.json", '[{"text": "abc"}]', r"a\.json is one value of JSON"),
        ],
    )
    def test_what_cannot_be_used_is_named(self, tmp_path: Path, name: str, content: str, text: str) -> None:
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=text):
            read_documents([tmp_path / name], make_tokenizer())

    @pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson"])
    def test_lines_of_json_are_known_by_their_names(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text('{"text": "abc"}\n', encoding="utf-8-sig")
        tokenizer = make_tokenizer()
        for data in (tmp_path, tmp_path / name):
            (document,) = read_documents([data], tokenizer)
            assert tokenizer.decode(document) == "abc"

    def test_what_a_run_writes_is_no_data_of_it(self, tmp_path: Path) -> None:
        """With `--data .` its log would be, once it goes on."""
        (tmp_path / "a.txt").write_text("abc")
        (tmp_path / "heads-work").mkdir()
        (tmp_path / "heads-work" / "log.jsonl").write_text('{"step": 10, "d1": 2.5}\n')
        tokenizer = make_tokenizer()
        found = read_documents([tmp_path], tokenizer, leaving_out=[tmp_path / "heads-work"])
        assert [tokenizer.decode(document) for document in found] == ["abc"]
        with pytest.raises(ConfigError, match=r"log\.jsonl:1 must be an object"):
            read_documents([tmp_path], tokenizer)
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "b.txt").write_text("def")
        found = read_documents([tmp_path / "texts"], tokenizer, leaving_out=[tmp_path])
        assert [tokenizer.decode(document) for document in found] == ["def"], "inside of --work is fine"

    def test_missing_and_foreign_files(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="nowhere does not exist"):
            read_documents([tmp_path / "nowhere"], make_tokenizer())
        (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="is not UTF-8"):
            read_documents([tmp_path / "a.txt"], make_tokenizer())

    def test_held_out_documents_are_a_function_of_their_tokens(self) -> None:
        documents = [np.arange(size) for size in range(2, 402)]
        train, held_out = split(documents)
        assert 5 <= len(held_out) <= 40
        assert len(train) + len(held_out) == 400
        assert all(is_held_out(document) for document in held_out)

    def test_of_a_single_document_the_end_is_held_out(self) -> None:
        train, held_out = split([np.arange(100)])
        assert [document.tolist() for document in train] == [list(range(95))]
        assert held_out[0].tolist() == list(range(95, 100))

    def test_what_is_held_out_is_in_no_copy_that_is_trained_on(self) -> None:
        other = np.arange(200, 230)
        documents = [np.arange(100), other, np.arange(100), np.arange(100)]
        assert not any(is_held_out(document) for document in documents), "or this says nothing"
        train, held_out = split(documents)
        assert sorted(len(document) for document in train) == [30, 95, 95, 95]
        assert held_out[0].tolist() == list(range(95, 100))
        assert not {*range(95, 100)} & {token for document in train for token in document.tolist()}


class TestRows:
    def rows(self, seed: int = 1) -> Rows:
        documents = [np.arange(10, 10 + size) for size in (30, 7, 55)]
        return Rows.cut(documents, separator=0, length=8, batch_rows=3, seed=seed)

    def test_all_tokens_are_there_with_separators(self) -> None:
        rows = self.rows()
        assert rows.tokens.shape == (11, 8)
        assert (rows.tokens == 0).sum() == 3
        assert not torch.equal(rows.tokens, self.rows(seed=2).tokens)

    def test_batches_are_a_function_of_their_number(self) -> None:
        rows, again = self.rows(), self.rows()
        epoch = [rows.indices(number) for number in range(3)]
        assert len({index for batch in epoch for index in batch}) == 9
        assert again.indices(2) == epoch[2]
        assert {tuple(sorted(rows.indices(number))) for number in range(3, 6)} != {
            tuple(sorted(batch)) for batch in epoch
        }

    def test_what_begins_texts_begins_rows(self) -> None:
        documents = [np.arange(10, 10 + size) for size in (30, 7, 55)]
        rows = Rows.cut(documents, separator=0, length=8, batch_rows=3, seed=1, lead=(1, 2))
        assert rows.tokens.shape == (15, 8)
        assert rows.tokens[:, :2].tolist() == [[1, 2]] * 15
        stream = self.rows().tokens.flatten()
        assert torch.equal(rows.tokens[:, 2:].flatten()[: len(stream)], stream)

    def test_too_little_text_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="11 tokens are too few: a step takes 2 rows of 8"):
            Rows.cut([np.arange(10)], separator=0, length=8, batch_rows=2, seed=0)


class TestCapture:
    def test_states_are_those_of_transformers(self, model: PreTrainedModel) -> None:
        tokens = torch.randint(2, 128, (2, 9), generator=torch.Generator().manual_seed(0))
        capture = Capture(model, (2, FINAL_NORM))
        states = capture.states(tokens)
        with torch.no_grad():
            expected = model(tokens, output_hidden_states=True)
        assert torch.equal(states[..., :16], expected.hidden_states[2])
        assert torch.equal(states[..., 16:32], expected.hidden_states[-1])
        assert torch.equal(capture.final(states), expected.hidden_states[-1])
        assert torch.equal(capture.hidden(states), states[..., :32])
        alone = Capture(model, (FINAL_NORM,))
        assert alone.width == 16, "kept once"
        assert torch.equal(alone.hidden(alone.states(tokens)), expected.hidden_states[-1])
        torch.testing.assert_close(capture.logits(states), expected.logits)

    def test_kept_states_are_computed_once(self, model: PreTrainedModel, tmp_path: Path) -> None:
        rows = torch.randint(2, 128, (5, 9), generator=torch.Generator().manual_seed(0))
        capture = Capture(model, (2,))
        kept = KeptStates(tmp_path, capture, rows, "target")
        first = kept.states([3, 1])
        assert kept.num_kept == 2
        assert torch.equal(first, capture.states(rows[[3, 1]]).bfloat16())
        again = KeptStates(tmp_path, capture, rows, "target")
        assert again.num_kept == 2
        capture.model.get_input_embeddings().weight.zero_()
        assert torch.equal(again.states([1, 3]), first.flip(0)), "read, not computed"
        assert KeptStates(tmp_path, capture, rows, "another target").num_kept == 0
        assert KeptStates(tmp_path, Capture(model, (3,)), rows, "target").num_kept == 0

    def test_states_whose_file_was_removed_are_computed_again(
        self, model: PreTrainedModel, tmp_path: Path
    ) -> None:
        rows = torch.randint(2, 128, (3, 9), generator=torch.Generator().manual_seed(0))
        capture = Capture(model, (2,))
        before = KeptStates(tmp_path, capture, rows, "target").states([0, 2])
        (states,) = tmp_path.glob("*.bin")
        states.unlink()
        again = KeptStates(tmp_path, capture, rows, "target")
        assert again.num_kept == 0
        assert torch.equal(again.states([0, 2]), before)
        assert before.any()

    def test_a_disk_that_gets_full_is_an_error_at_the_beginning(
        self, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Later it is a signal that ends the process without a word."""

        def is_full(_: int, start: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", is_full)
        rows = torch.zeros((3, 9), dtype=torch.int64)
        with pytest.raises(ResourceError, match=r"--keep-hidden: hidden states take .* without it"):
            KeptStates(tmp_path, Capture(model, (2,)), rows, "target")
        assert not list(tmp_path.iterdir()), "what could be taken is free again"


def test_the_tokenizer_is_the_targets(target_folder: Path) -> None:
    assert load_tokenizer(target_folder).eos_token_id == 0

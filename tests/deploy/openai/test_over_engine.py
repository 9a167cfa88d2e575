"""The door over a real engine on a tiny random model, by the official client: what users are promised."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from deploy.openai.app import create_app
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import make_tokenizer, save_model
from tests.deploy.openai.fakes import CHAT_TEMPLATE
from tests.deploy.openai.live import live_server

OFF = CompileConfig(mode="off")
NUM_BLOCKS = 96


@dataclass
class Served:
    """A served tiny model, and the same model in transformers' hands."""

    url: str
    client: openai.OpenAI
    engine: Engine
    reference: transformers.PreTrainedModel

    def complete(self, **fields: Any) -> Any:
        fields = {"model": "target", "prompt": "def f(x):", "temperature": 0, "max_tokens": 24} | fields
        ours = ("speculation", "ignore_eos", "return_token_ids", "return_metrics", "top_k", "min_p")
        ours += ("prompt_logprobs", "logprobs_mode")
        extra = {name: fields.pop(name) for name in ours if name in fields}
        return self.client.completions.create(**fields, extra_body=extra)

    def greedy(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        """transformers' own greedy continuation, EOS ignored."""
        with torch.no_grad():
            output = self.reference.generate(
                torch.tensor([prompt_ids]),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(token_id) for token_id in output[0][len(prompt_ids) :]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    reference = save_model(folder / "target", seed=1)
    save_model(folder / "draft", seed=1)  # the same weights: everything drafted is accepted
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    config = EngineConfig(
        target=ModelConfig(model=str(folder / "target"), dtype="float32", device="cpu", compile=OFF),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(folder / "draft"),
            num_speculative_tokens=3,
            controller="fixed",
            compile=OFF,
        ),
        cache=CacheConfig(block_size=8, num_blocks=NUM_BLOCKS),
    )
    engine = Engine(config)
    service = AsyncEngine(engine)
    door_tokenizer = HuggingFaceTokenizer.load(Path(config.target.model))
    app = create_app(service, DoorSettings(served_model_name="target"), door_tokenizer)
    try:
        with (
            live_server(app) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
        ):
            yield Served(url, client, engine, reference)
    finally:
        service.close()


def random_prompt(generator: random.Random) -> list[int]:
    return [generator.randrange(2, 128) for _ in range(generator.randrange(1, 60))]


def test_greedy_is_what_transformers_generates(served: Served) -> None:
    generator = random.Random(5)
    prompts = [random_prompt(generator) for _ in range(6)]
    completion = served.complete(prompt=prompts, ignore_eos=True, return_token_ids=True, return_metrics=True)
    for prompt, choice in zip(prompts, completion.choices, strict=True):
        assert choice.token_ids == served.greedy(prompt, 24)
    # Speculation did run.
    assert completion.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_same_seed_same_tokens_whatever_is_drafted(served: Served, temperature: float) -> None:
    texts = set()
    for num_drafted in (0, 1, 3, 8):
        completion = served.complete(
            temperature=temperature, seed=7, speculation={"num_speculative_tokens": num_drafted}
        )
        texts.add(completion.choices[0].text)
    assert len(texts) == 1
    if temperature:
        assert served.complete(temperature=temperature, seed=8).choices[0].text not in texts


def test_choices_differ_and_are_reproducible(served: Served) -> None:
    first = served.complete(temperature=1, n=4, seed=3)
    again = served.complete(temperature=1, n=4, seed=3)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 4
    assert texts == [choice.text for choice in again.choices]
    assert first.usage is not None
    assert first.usage.completion_tokens <= 4 * 24


def test_stream_is_the_text_of_the_whole_response(served: Served) -> None:
    whole = served.complete(temperature=1, seed=1)
    with served.complete(
        temperature=1, seed=1, stream=True, stream_options={"include_usage": True}, return_token_ids=True
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    token_ids = [token_id for chunk in chunks[:-1] for token_id in chunk.choices[0].token_ids]
    assert len(token_ids) == chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_logprobs_are_those_of_the_target(served: Served) -> None:
    prompt = [5, 6, 7, 8]
    choice = served.complete(prompt=[prompt], logprobs=3, return_token_ids=True, ignore_eos=True).choices[0]
    with torch.no_grad():
        logits = served.reference(torch.tensor([[*prompt, *choice.token_ids]])).logits[0].float()
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    chosen = expected.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), chosen, atol=1e-4, rtol=0)
    assert [len(top) for top in choice.logprobs.top_logprobs] == [3] * len(choice.token_ids)


def prompt_scores(served: Served, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logprobs = served.reference(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def test_echo_puts_the_prompt_in_front(served: Served) -> None:
    plain = served.complete(seed=3, temperature=1, logprobs=2, return_token_ids=True).choices[0]
    echoed = served.complete(seed=3, temperature=1, logprobs=2, echo=True, return_token_ids=True)
    choice = echoed.choices[0]
    num_prompt = echoed.usage.prompt_tokens
    assert choice.text == "def f(x):" + plain.text
    assert choice.token_ids == plain.token_ids
    scores = choice.logprobs
    assert scores.token_logprobs[0] is None
    assert scores.top_logprobs[0] is None
    assert scores.token_logprobs[num_prompt:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert len({len(scores.tokens), len(scores.text_offset), num_prompt + len(plain.token_ids)}) == 1
    expected = prompt_scores(served, choice.prompt_token_ids)
    found = torch.tensor(scores.token_logprobs[1:num_prompt])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for token, offset in zip(scores.tokens[:num_prompt], scores.text_offset, strict=False):
        assert choice.text[offset:].startswith(token)


def test_echo_in_a_stream_is_the_same(served: Served) -> None:
    wanted = {"seed": 3, "temperature": 1, "logprobs": 2, "echo": True, "n": 2, "prompt": ["abc", "de"]}
    whole = served.complete(**wanted)
    texts = [""] * 4
    logprobs: list[list[float | None]] = [[] for _ in range(4)]
    with served.complete(stream=True, **wanted) as stream:
        for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    for ours, choice in zip(logprobs, whole.choices, strict=True):
        assert ours[0] is choice.logprobs.token_logprobs[0] is None
        assert ours[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


def test_a_prompt_alone_can_be_scored(served: Served) -> None:
    completion = served.complete(prompt=[[5, 6, 7, 8]], max_tokens=0, echo=True, logprobs=0)
    choice = completion.choices[0]
    assert completion.usage.completion_tokens == 0
    assert choice.finish_reason == "length"
    found = torch.tensor(choice.logprobs.token_logprobs[1:])
    torch.testing.assert_close(found, prompt_scores(served, [5, 6, 7, 8]), atol=1e-4, rtol=0)
    assert served.complete(max_tokens=0, echo=True).choices[0].text == "def f(x):"


def test_every_choice_has_the_scores_of_its_prompt(served: Served) -> None:
    wanted = {"prompt": [[5, 6, 7, 8], [9, 10]], "max_tokens": 2}
    alone = [choice.prompt_logprobs for choice in served.complete(prompt_logprobs=2, **wanted).choices]
    both = served.complete(prompt_logprobs=2, n=2, seed=1, temperature=1, **wanted)
    assert [len(scores) for scores in alone] == [4, 2]
    for index, choice in enumerate(both.choices):
        expected = alone[index // 2]
        assert [position and set(position) for position in choice.prompt_logprobs] == [
            position and set(position) for position in expected
        ]


def test_prompt_logprobs_in_their_users_shape(served: Served) -> None:
    choice = served.complete(prompt=[[5, 6, 7, 8]], max_tokens=1, prompt_logprobs=2).choices[0]
    first, *rest = choice.prompt_logprobs
    assert first is None
    found = [rest[index][str(token_id)]["logprob"] for index, token_id in enumerate([6, 7, 8])]
    torch.testing.assert_close(torch.tensor(found), prompt_scores(served, [5, 6, 7, 8]), atol=1e-4, rtol=0)
    for position in rest:
        assert {1, 2} <= {entry["rank"] for entry in position.values()}
    chat = served.client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=1,
        extra_body={"prompt_logprobs": 0},
    )
    assert chat.usage is not None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_best_of(served: Served, mode: str) -> None:
    """By raw log-probabilities, whatever would be reported if any were."""
    every = served.complete(temperature=1, seed=5, n=5, logprobs=0)
    best = served.complete(temperature=1, seed=5, n=2, best_of=5, logprobs_mode=mode)
    mean = [sum(one.logprobs.token_logprobs) / len(one.logprobs.token_logprobs) for one in every.choices]
    ranked = sorted(range(5), key=lambda index: -mean[index])[:2]
    assert [one.text for one in best.choices] == [every.choices[index].text for index in ranked]
    assert [one.index for one in best.choices] == [0, 1]
    assert [one.logprobs for one in best.choices] == [None, None]
    assert best.usage.completion_tokens == every.usage.completion_tokens, "all that was generated"
    assert best.usage.prompt_tokens == every.usage.prompt_tokens


def test_stop_string_ends_the_text_before_it(served: Served) -> None:
    text = served.complete(ignore_eos=True, max_tokens=40).choices[0].text
    stop = text[10:13]
    choice = served.complete(ignore_eos=True, max_tokens=40, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    assert choice.text == text[: text.index(stop)]


def test_chat_template_reaches_the_model(served: Served) -> None:
    completion = served.client.chat.completions.create(
        model="target",
        messages=[{"role": "user", "content": "hi"}],
        temperature=0,
        max_completion_tokens=8,
        extra_body={"ignore_eos": True},
    )
    same = served.complete(prompt="[user]hi[assistant]", max_tokens=8, ignore_eos=True)
    assert completion.choices[0].message.content == same.choices[0].text
    assert completion.usage is not None
    assert same.usage is not None
    assert completion.usage.prompt_tokens == same.usage.prompt_tokens


def test_sixteen_concurrent_streams_are_what_each_is_alone(served: Served) -> None:
    generator = random.Random(11)
    prompts = [random_prompt(generator) for _ in range(16)]

    def run(index: int) -> str:
        with served.complete(
            prompt=[prompts[index]], temperature=0.8, seed=index, max_tokens=40, ignore_eos=True, stream=True
        ) as stream:
            return "".join(chunk.choices[0].text for chunk in stream)

    alone = [run(index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(run, range(16)))
    assert together == alone
    assert len(set(together)) > 8


def test_client_that_leaves_frees_its_blocks(served: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        if "ray_drafthouse_num_requests_running 0.0" in lines:
            break
    assert "ray_drafthouse_num_requests_running 0.0" in lines
    assert "ray_drafthouse_kv_cache_usage_perc 0.0" in lines
    assert 'ray_drafthouse_request_success_total{finished_reason="abort"} 1.0' in lines
    served.engine.check_integrity()


def test_bad_input_does_not_disturb_running_streams(served: Served) -> None:
    expected = served.complete(temperature=1, seed=2, max_tokens=120, ignore_eos=True).choices[0].text
    bad_bodies: list[bytes] = [
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -1}',
        b'{"prompt": "a", "max_tokens": -5}',
        b'{"prompt": "a", "max_tokens": "many"}',
        b'{"prompt": ""}',
        b'{"prompt": "a", "max_tokens": 100000}',
        b'{"prompt": ',
        b"\xff\xfe",
        b'{"prompt": "' + b"a" * (10 << 20) + b'"}',
    ]

    def stream(_: int) -> str:
        with served.complete(temperature=1, seed=2, max_tokens=120, ignore_eos=True, stream=True) as chunks:
            return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, index) for index in range(4)]
        answers = [
            pool.submit(httpx.post, f"{served.url}/v1/completions", content=body, timeout=60)
            for body in bad_bodies
        ]
        statuses = [answer.result().status_code for answer in answers]
        assert [future.result() for future in streams] == [expected] * 4
    assert statuses == [400] * 8 + [413]

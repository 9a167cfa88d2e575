"""The list of families, the arithmetic of the table and its page, and that a family's cell runs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import typer
from rich.console import Console

from benchmarks import draft_costs, drafters, drafters_cell, steady
from benchmarks.deployments import ExchangedController, Setting
from benchmarks.draft_costs import DraftCost, cost_headlines, cost_table
from benchmarks.drafter_families import FAMILIES, PLAIN, Places, families_of
from benchmarks.drafter_texts import CLASSES, mixed
from benchmarks.drafters import Machine, engine_config, measure
from benchmarks.drafters_cell import Bench
from benchmarks.drafters_plan import AS_IT_IS, FULL, INFLATED, ON_GPU, QUICK, Cell, Plan
from benchmarks.drafters_summary import Round, headlines_of, is_sure, short_of, shortened_of, table_of
from benchmarks.kept_cells import KeptCells
from benchmarks.kv_costs import Step
from benchmarks.report import PairedRatio, progress_bar, to_plain
from benchmarks.steady import Batch, Counted, decode_tokens, read
from benchmarks.tensor_memory import live_tensor_bytes
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.proposers.config import Method
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.benchmarks.drafter_cells import a_cell, as_measured, some_cells
from tests.specdec.engine.toy_engines import MODEL, VOCAB_SIZE, make_proposer

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
RESULTS = ROOT / "benchmarks" / "results" / "drafters.json"
PLACES = Places(draft=DEMO / "draft", heads=Path("heads"), corpus=Path("corpus.jsonl"), index=Path("index"))
CPU = Machine(num_threads=1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_can_be_configured(family: Any) -> None:
    config = engine_config(FULL, DEMO / "target", family.config(PLACES), CPU).speculative_config
    assert config.num_speculative_tokens == max(family.lengths)
    assert config.controller == "fixed"
    assert (config.model is not None) == (family.needs in ("draft", "heads"))


def test_heads_of_four_tokens_ahead_are_asked_for_more(tmp_path: Path) -> None:
    places = dataclasses.replace(PLACES, heads=tmp_path)
    chain, tree = families_of(("medusa", "medusa_tree"))
    assert (chain.with_heads_of(places), tree.with_heads_of(places)) == (chain, tree), "nothing is there"
    (tmp_path / "medusa").mkdir()
    for depth, lengths, widths in ((2, (1, 2), [4, 2]), (4, (1, 2, 4), [4, 2, 1, 1])):
        (tmp_path / "medusa" / "acceptance.json").write_text(json.dumps({"recipe": {"depth": depth}}))
        assert chain.with_heads_of(places).lengths == lengths
        config = engine_config(FULL, DEMO / "target", tree.with_heads_of(places).config(places), CPU)
        assert config.speculative_config.tree is not None
        assert list(config.speculative_config.tree.widths) == widths


def test_graphs_of_a_gpu_are_as_large_as_a_round() -> None:
    machine = Machine(num_threads=1, device="cuda")
    config = engine_config(ON_GPU, DEMO / "target", {"method": PLAIN}, machine, graph_rows=32)
    assert config.target.compile.cuda_graph_max_rows == 32


def test_the_device_is_that_of_the_target_and_of_a_draft_model() -> None:
    """What else drafts is where the target is."""
    machine = Machine(num_threads=1, device="cuda")
    for name, device in (("draft_model", "cuda"), ("eagle", "auto"), ("self_tree", "auto")):
        (family,) = families_of((name,))
        config = engine_config(FULL, DEMO / "target", family.config(PLACES), machine)
        assert (config.target.device, config.speculative_config.device) == ("cuda", device)
    assert Machine.here("cpu").settings == {}, "what was measured before is gone on with"
    assert machine.settings == {"device": "cuda"}


def test_a_device_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.BadParameter, match="--device: device 'nowhere' cannot be used"):
        drafters.main(device="nowhere")
    monkeypatch.setattr(drafters, "resolve_device", lambda _: torch.device("cuda"))
    with pytest.raises(typer.BadParameter, match="--costs compares native calls"):
        drafters.main(costs=True)


def test_every_method_of_the_engine_is_in_the_table() -> None:
    """Whoever adds one writes a line in `benchmarks.drafter_families`."""
    measured = {family.config(PLACES)["method"] for family in FAMILIES}
    assert measured == set(get_args(Method)) - {"several"}, "several is a choice of others"


def test_families_are_chosen_by_name() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert families_of(()) == FAMILIES
    assert [one.name for one in families_of(("mtp", "ngram"))] == ["mtp", "ngram"]
    with pytest.raises(ValueError, match="no family 'engram'; known are none, ngram"):
        families_of(("engram",))


def test_what_is_said_of_costs_is_of_the_smallest_batch_above_one() -> None:
    fields = {"num_draft_tokens": 4, "eager_s": 0.02, "plain_s": 0.002, "weight_bytes": 10, "floor_s": 0.001}
    costs = [
        DraftCost(family=family, batch=batch, native_s=seconds, **fields)
        for family, batch, seconds in (("eagle", 1, 0.001), ("eagle", 2, 0.003), ("medusa", 2, 0.002))
    ]
    assert cost_headlines(costs) == {
        "draft_cost_b2_eagle": pytest.approx(1.5),
        "draft_cost_b2_medusa": pytest.approx(1.0),
        "worst_over_floor_b2": pytest.approx(3.0),
    }
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(cost_table(costs))
    assert "20.00" in console.export_text(), "eager ms"


@pytest.mark.full
def test_costs_of_heads_that_nobody_has_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain of each kind, on the demo target."""
    monkeypatch.setattr(draft_costs, "_REPEATS", 1)
    families = families_of(("hydra_plus", "eagle3"))
    with draft_costs.all_heads(families, DEMO / "target", PLACES) as places:
        for family in families:
            config_of = partial(engine_config, QUICK, DEMO / "target", machine=CPU)
            (cost,) = draft_costs.costs_of(family, places, (1,), config_of)
            assert cost.weight_bytes > 4096 * 256 * 2, "of an LM head at least"
            assert min(cost.eager_s, cost.native_s, cost.floor_s) > 0.0


def test_prompts_of_all_classes_take_turns() -> None:
    prompts = {"code": [(1,), (2,)], "docstring": [(3,), (4,)], "repeated": [(5,), (6,)]}
    assert mixed(prompts, 4) == [(1,), (3,), (5,), (2,)]
    assert mixed(prompts, 7)[6] == (1,)


def test_possible_is_what_acceptance_and_costs_allow() -> None:
    whole = Round(tokens_per_pass=3.0, drafted_per_pass=4.0, draft_s=0.002)
    parts = {"plain_s": 0.010, "undrafted_s": 0.010, "verify_s": 0.014}
    assert whole.possible(parts, 4) == pytest.approx(3.0 * 0.010 / (0.002 + 0.014))
    assert whole.possible(parts, 4, is_free=True) == pytest.approx(3.0 * 0.010 / 0.014)
    half = Round(tokens_per_pass=1.5, drafted_per_pass=2.0, draft_s=0.0)
    assert half.possible(parts, 4) == pytest.approx(1.5 * 0.010 / 0.012), "half of the passes have a draft"
    none = Round(tokens_per_pass=1.0, drafted_per_pass=0.0, draft_s=0.0)
    assert none.possible(parts, 4) == 1.0
    beside = {**parts, "undrafted_s": 0.013}
    assert none.possible(beside, 4) == pytest.approx(10 / 13), "rows beside drafts are there without any"


def test_a_cell_is_summed_up_over_classes() -> None:
    cell = a_cell("eagle", {"code": 100.0, "docstring": 100.0, "repeated": 800.0})
    assert cell["speedup"].median == pytest.approx(2.0), "the geometric mean of 1, 1 and 8"
    assert cell["tokens_per_pass"] == pytest.approx(1.5)
    assert cell["reached"] == pytest.approx([0.5])
    assert cell["draft_cost"] == pytest.approx(0.1)
    possible = 1.5 * 0.010 / (0.001 + 0.012)
    assert cell["possible"].median == pytest.approx(possible)
    assert cell["share_of_possible"].median == pytest.approx(2.0 / possible)
    assert cell["possible_if_free"].median == pytest.approx(1.5 * 0.010 / 0.012)
    code = cell["classes"]["code"]
    assert code["share_of_possible"].median == pytest.approx(1.0 / possible)
    assert code["drafted_per_pass"] == 2.0
    assert code["share_with_drafts"] == 1.0
    assert code["round_ms"]["draft"] == pytest.approx(1.0)
    assert code["round_ms"]["rest"] == pytest.approx(1e3 * 1.5 / 100.0 - 1.0 - 10.0)


def test_passes_of_a_batch_are_those_of_its_sequences() -> None:
    cell = a_cell("eagle", {"code": 100.0}, batch=8)
    assert cell["tokens_per_pass"] == pytest.approx(1.5)
    assert cell["draft_cost"] == pytest.approx(0.1), "of a round, whatever the batch"


def test_headlines_are_of_the_costly_target_alone_and_greedy() -> None:
    cells = some_cells()
    headlines = headlines_of(cells)
    assert headlines["speedup_b1_t0_eagle"] == pytest.approx(1.4)
    assert headlines["tokens_per_pass_ngram"] == pytest.approx(1.5)
    assert headlines["share_of_possible_eagle"] == cells[2]["share_of_possible"].median
    assert headlines["best_speedup_b1_t0_repeated"] == pytest.approx(3.6)
    assert headlines["worst_share_of_possible"] == cells[3]["share_of_possible"].median
    values = (0.5, 0.9, 1.4, 0.7)
    unsure = {**cells[3], "share_of_possible": PairedRatio(values)}
    assert headlines_of([*cells[:3], unsure])["worst_share_of_possible"] == pytest.approx(
        cells[2]["share_of_possible"].median
    ), "not that of a cell that says nothing"
    assert "worst_share_of_possible" not in headlines_of([unsure])
    wide_but_short = {**cells[3], "share_of_possible": PairedRatio((0.45, 0.6, 0.75, 0.5))}
    assert headlines_of([*cells[:3], wide_but_short])["worst_share_of_possible"] == pytest.approx(0.55)
    assert not any(name.endswith(f"_{PLAIN}") for name in headlines)
    assert headlines_of(cells[:1]) == {}
    (short,) = short_of(cells)
    assert short.startswith("inflated, eagle, batch 32, temperature 0: 0.78 of what is possible")
    assert "1.00 ms drafting" in short
    Console(file=None, quiet=True).print(table_of(cells))
    Console(file=None, quiet=True).print(table_of([]))


def test_headlines_are_those_of_the_cells_that_are_committed() -> None:
    """Whoever changes what they are of writes those of the file anew, from its cells."""
    results = json.loads(RESULTS.read_text())
    cells = [as_measured(cell) for cell in results["cells"]]
    assert results["headlines"] == headlines_of(cells)
    assert results["short"] == short_of(cells)
    assert results["shortened"] == shortened_of(cells, results["plan"]["tokens_per_prompt"])


def test_bounds_tell_the_goal_from_one_or_not() -> None:
    assert is_sure(0.85, 1.0)
    assert is_sure(0.75, 1.03)
    assert not is_sure(0.7, 1.0)
    assert not is_sure(0.0, math.inf), "of a single pair"


def test_how_many_cells_were_cut_short_is_told() -> None:
    cells = some_cells()
    assert not shortened_of(cells, 48)
    cells[1]["tokens_per_prompt"] = 9
    assert shortened_of(cells, 48) == f"1 of {len(cells)} cells decoded 9 tokens of each text, not 48"
    cells[2]["tokens_per_prompt"] = 20
    assert shortened_of(cells, 48).startswith(f"2 of {len(cells)} cells decoded 9 to 20 tokens")


def test_tensors_are_counted_once() -> None:
    before = live_tensor_bytes()["cpu"]
    kept = torch.zeros(1000)
    nowhere = torch.zeros(1000, device="meta")
    views = [kept[:10], kept.view(10, 100), kept[5:20]]
    assert live_tensor_bytes()["cpu"] - before == 4000
    assert "meta" not in live_tensor_bytes(), "there is nothing of them"
    del kept, views, nowhere
    arena = torch.zeros(1000, dtype=torch.uint8)
    taken, arena = arena[:100], arena[128:]
    assert live_tensor_bytes()["cpu"] - before == 100, "what is left of an arena was never written"
    del taken, arena
    assert live_tensor_bytes()["cpu"] == before


def test_drafts_are_counted_while_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until so many tokens are there, with the drafts of those rounds alone."""
    monkeypatch.setattr(steady, "_SETTLED_S", math.inf)
    exchanged = ExchangedController()
    engine = Engine.from_parts(
        target=ToyTarget(MODEL, num_blocks=1024, max_model_len=256),
        proposer=make_proposer("draft_model"),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        controller=exchanged,
    )
    batch = Batch(prompts=[(1, 2, 3), (4, 5)], num_tokens=60, temperature=0.7, seed=3)
    read(engine, batch.prompts, lambda: None)
    for length in (0, 3):
        exchanged.current = Setting(num_draft_tokens=length).controller()
        one, again = (decode_tokens(engine, batch, 90) for _ in range(2))
        assert one.num_tokens >= 90
        assert one.num_tokens - sum(one.drafts.accepted) == 2 * one.num_rounds
        assert one.drafts.num_drafts == (2 * one.num_rounds if length else 0)
        assert (one.num_tokens, one.num_rounds, one.drafts.accepted) == (
            again.num_tokens,
            again.num_rounds,
            again.drafts.accepted,
        ), "the same texts"
        total = Counted()
        total.add(one)
        total.add(again)
        assert total.num_tokens == 2 * one.num_tokens
        assert total.drafts.num_drafts == 2 * one.drafts.num_drafts
    assert not engine.has_work


class RecordingEngine:
    """Notes what it is to decode; each draft length has a rate."""

    def __init__(self, name: str, rates: dict[int, float], log: list[tuple[Any, ...]]) -> None:
        self._name = name
        self._rates = rates
        self._log = log
        self.target = SimpleNamespace(runner=name)
        self.proposer = SimpleNamespace(capabilities=SimpleNamespace(num_rows_beside=0))

    def decode_tokens(self, batch: Batch, controller: FixedController, num_tokens: int) -> Counted:
        length = int(controller.state.mean_num_draft_tokens)
        self._log.append(
            (self._name, length, tuple(batch.prompts), batch.temperature, batch.seed, num_tokens)
        )
        seconds = num_tokens / self._rates[length]
        return Counted(num_tokens=num_tokens, seconds=seconds, num_rounds=num_tokens // len(batch.prompts))


def test_both_decode_the_same_texts_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[Any, ...]] = []
    bare: list[tuple[Any, Step]] = []

    def forwards_in_turn(forwards: dict[str, tuple[Any, Step]]) -> dict[str, float]:
        bare.extend(forwards.values())
        return {name: 0.01 * step.rows for name, (_, step) in forwards.items()}

    monkeypatch.setattr(drafters_cell, "forwards_in_turn", forwards_in_turn)
    (family,) = families_of(("ngram",))
    plan = dataclasses.replace(QUICK, num_prompts=4, pairs=2, prompts_per_turn=2, cell_s=60.0)
    prompts = {name: [(10 * at + n,) for n in range(4)] for at, name in enumerate(CLASSES)}
    rates = {2: 100.0, 4: 300.0, 8: 200.0}
    plain: Any = RecordingEngine("plain", {0: 100.0}, log)
    engine: Any = RecordingEngine("drafted", rates, log)
    cell = Cell(target=INFLATED, family="ngram", batch=1, temperature=0.7)
    ticks: list[None] = []
    result = Bench(plan, family, plain, engine, prompts).cell(cell, lambda: ticks.append(None))
    assert result["k"] == 4
    assert result["tried"] == rates
    assert result["speedup"].median == pytest.approx(3.0)
    assert len(ticks) == 1 + plan.pairs
    turns = [one for one in log if one[-1] == plan.tokens_per_prompt]
    assert [one[0] for one in turns[:4]] == ["plain", "plain", "drafted", "drafted"]
    of_second_pair = turns[len(turns) // 2 :]
    assert [one[0] for one in of_second_pair[:4]] == ["drafted", "drafted", "plain", "plain"]
    by_name = {name: sorted(one[2:] for one in turns if one[0] == name) for name in ("plain", "drafted")}
    assert by_name["plain"] == by_name["drafted"]
    assert {one[2] for one in turns} == {(prompt,) for own in prompts.values() for prompt in own}
    assert len({one[4] for one in turns}) == 4, "a seed for each batch of a class"
    assert {one[3] for one in turns} == {0.7}
    assert [(runner, step.batch, step.rows) for runner, step in bare] == [
        ("plain", 1, 1),
        ("drafted", 1, 5),
    ] * plan.pairs


class KeptEngine:
    """Stands for an engine with its memory."""

    num_bytes = 0
    engine: Any = None

    def close(self) -> None:
        """Nothing to free."""


def test_a_run_ends_when_it_is_time_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is written, with what is left. A cell takes forty seconds of a minute."""
    now_s = [0.0]
    opened: list[str] = []

    def open_engine(config: Any) -> KeptEngine:
        opened.append(config.speculative_config.method)
        return KeptEngine()

    def cell(self: Any, cell: Cell, tick: Any) -> dict[str, Any]:
        now_s[0] += 40.0
        made = a_cell(cell.family, dict.fromkeys(CLASSES, 150.0), target=cell.target)
        return {name: value for name, value in made.items() if name not in ("cell", "memory_bytes")}

    monkeypatch.setattr(drafters, "Held", open_engine)
    monkeypatch.setattr(drafters, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(drafters, "inflate", lambda *_: None)
    monkeypatch.setattr(drafters, "layers_for_parameters", lambda *_: 8)
    monkeypatch.setattr(drafters, "_prompts", lambda *_: {})
    monkeypatch.setattr(drafters, "load_corpus", lambda: SimpleNamespace(train=[]))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(Bench, "cell", cell)
    file = tmp_path / "results.json"
    asked: Any = {"family": ["ngram", "lookahead", "layerskip"], "quick": True, "json": file, "models": DEMO}
    drafters.main(**asked, minutes=1.0, heads=tmp_path)
    results = json.loads(file.read_text())
    assert [one["cell"]["family"] for one in results["cells"]] == ["ngram", "lookahead"]
    assert opened == [PLAIN, "ngram", "lookahead"]
    assert results["cells"][0]["taken_s"] == 40.0
    num_left = results["rest"]["num_cells"]
    assert results["rest"]["seconds"] == 40.0 * num_left
    assert results["headlines"]["speedup_b1_t0_ngram"] == pytest.approx(1.5)
    drafters.main(**asked, minutes=1.0, heads=tmp_path, resume=True)
    again = json.loads(file.read_text())
    assert [one["cell"]["family"] for one in again["cells"]] == ["ngram", "lookahead", "layerskip"]
    assert opened == [PLAIN, "ngram", "lookahead", PLAIN, "layerskip"]
    assert again["rest"]["num_cells"] == num_left - 1
    drafters.main(**asked, minutes=0.0, heads=tmp_path, resume=True)
    assert len(opened) == 5, "only what is there is reported"


TINY = Plan(
    targets=(AS_IT_IS,),
    batches=(2,),
    temperatures=(0.7,),
    pairs=2,
    num_prompts=2,
    prompts_per_turn=2,
    tokens_per_prompt=8,
    try_tokens=4,
    try_turns=2,
    cell_s=60.0,
    text_tokens=64,
    num_corpus_files=4,
)


@pytest.mark.full
def test_a_cell_of_every_family_runs(tmp_path: Path) -> None:
    """But of those whose heads are not there."""
    places = dataclasses.replace(PLACES, heads=DEMO / "heads")
    families = [one for one in FAMILIES if one.is_there(places)]
    assert {"eagle", "eagle_tree", "medusa", "medusa_tree"} < {one.name for one in families}
    before = torch.get_num_threads()
    kept = KeptCells(tmp_path / "results.json", to_plain(TINY), resume=False)
    try:
        with progress_bar() as progress:
            measure(TINY, families, DEMO, DEMO / "heads", progress, kept, Machine.here("cpu"))
    finally:
        torch.set_num_threads(before)
    again = KeptCells(tmp_path / "results.json", to_plain(TINY), resume=True)
    for family in families:
        (cell,) = TINY.cells([family])
        result = again.result(cell)
        assert set(result["classes"]) == set(CLASSES), family.name
        assert result["k"] in family.lengths, family.name
        assert result["taken_s"] > 0.0, family.name
        assert 1.0 <= result["tokens_per_pass"] <= 1 + max(family.lengths), family.name
        assert result["share_of_possible"].median > 0.0, family.name
        share = result["classes"]["code"]["share_with_drafts"]
        is_always_there = family.needs in ("draft", "heads") or family.name in ("mtp", "layerskip")
        assert share == 1.0 or not is_always_there, family.name
        if family.needs == "draft":
            assert result["memory_bytes"] > 2_000_000, family.name

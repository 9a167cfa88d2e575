"""`drafthouse train`: a drafter for a target, from texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.border import DebugOption
from specdec.core.errors import ConfigError


def train(
    method: Annotated[
        Literal[
            "medusa",
            "hydra",
            "eagle",
            "eagle3",
            "mtp",
            "parallel_heads",
            "medusa2",
            "layerskip",
            "draft_model",
        ],
        typer.Argument(help="What is trained."),
    ],
    target: Annotated[Path, typer.Option(help="Folder of the target model; nothing is written to it.")],
    data: Annotated[
        list[Path],
        typer.Option(
            help="Text files, JSON lines (text, prompt and completion, messages, or conversations) or "
            "folders; repeatable."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for what is made: it must be new, or of this very run.")],
    work: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoints, log and caches; without it, OUT with -work behind it."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1000,
    row_length: Annotated[int, typer.Option(help="Tokens of a row.")] = 512,
    batch_rows: Annotated[int, typer.Option(help="Rows of a forward.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Forwards before the optimizer moves.")] = 1,
    depth: Annotated[
        int, typer.Option(help="Tokens to look ahead: heads, steps of training, or of what is measured.")
    ] = 4,
    decay: Annotated[
        float,
        typer.Option(
            help="medusa, hydra, eagle3, mtp, parallel_heads, medusa2: weight of each token ahead, of that "
            "before it."
        ),
    ] = 0.8,
    num_layers: Annotated[
        int,
        typer.Option(
            help="medusa, hydra, medusa2: residual blocks of a head; eagle: its layers; draft_model: those "
            "of the target that it gets."
        ),
    ] = 1,
    num_modules: Annotated[
        int, typer.Option(help="mtp: modules, one for each depth; the last one for all later ones.")
    ] = 1,
    prefix_layer: Annotated[bool, typer.Option("--prefix-layer", help="Hydra++.")] = False,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="EAGLE-3: token ids that it knows; without it, 32,000 at most.")
    ] = None,
    fused_layers: Annotated[
        str | None, typer.Option(help="EAGLE-3: states that it reads, such as 2,4,5; 0 is the embeddings.")
    ] = None,
    v31: Annotated[bool, typer.Option("--v31", help="EAGLE-3.1.")] = False,
    feature_noise: Annotated[
        float, typer.Option(help="eagle: width of the noise on features, to either side.")
    ] = 0.1,
    classification_weight: Annotated[
        float, typer.Option(help="eagle: of the cross entropy, beside the regression of features.")
    ] = 0.1,
    samples: Annotated[
        int, typer.Option(help="Train on so many rows that the target writes itself; 0: on the texts.")
    ] = 0,
    sample_temperature: Annotated[float, typer.Option(help="Of --samples.")] = 0.7,
    start_from: Annotated[
        Path | None,
        typer.Option(
            help="Train the weights of this folder further; mtp: may be the target's own folder; "
            "draft_model: any model with the target's tokenizer; medusa2: Medusa heads."
        ),
    ] = None,
    allow_pickled_weights: Annotated[
        bool,
        typer.Option(
            "--allow-pickled-weights",
            help="Read --start-from of a pickled file (.pt, .bin) where it has no safetensors.",
        ),
    ] = False,
    keep_hidden: Annotated[
        bool, typer.Option("--keep-hidden", help="Keep the target's hidden states in WORK.")
    ] = False,
    heads_first: Annotated[
        int, typer.Option(help="medusa2: steps in which the heads learn alone, before the target joins in.")
    ] = 0,
    heads_weight: Annotated[
        float, typer.Option(help="medusa2: of the heads' losses, beside the target's own.")
    ] = 0.2,
    target_loss: Annotated[
        Literal["text", "self"],
        typer.Option(help="medusa2: hold the target to the text, or (with --lora-rank) to what it was."),
    ] = "text",
    lora_rank: Annotated[
        int, typer.Option(help="medusa2: train matrices of this rank beside the target's; 0: its own.")
    ] = 0,
    lora_alpha: Annotated[float, typer.Option(help="medusa2: they are scaled by alpha / rank.")] = 16.0,
    store: Annotated[
        Literal["target", "adapter"],
        typer.Option(help="medusa2: write the target that comes of it, or what is added (with --lora-rank)."),
    ] = "target",
    target_rate: Annotated[
        float, typer.Option(help="medusa2, layerskip: the target's learning rates, as a share of the others.")
    ] = 0.25,
    layer_dropout: Annotated[
        float, typer.Option(help="layerskip: how often the last layer is left out; earlier ones less.")
    ] = 0.1,
    exit_scale: Annotated[float, typer.Option(help="layerskip: weight of early exits' losses.")] = 0.5,
    exit_layer: Annotated[
        int | None,
        typer.Option(help="layerskip: layers to measure drafts of; without it, half of them."),
    ] = None,
    divergence: Annotated[
        Literal["forward_kl", "reverse_kl", "jsd", "total_variation"],
        typer.Option(help="draft_model: between the target's distribution and its own."),
    ] = "forward_kl",
    on_policy: Annotated[
        float, typer.Option(help="draft_model: share of the steps on what it writes itself.")
    ] = 0.5,
    hidden_folder: Annotated[
        Path | None,
        typer.Option(help="Keep them in this folder instead, which runs with another WORK may share."),
    ] = None,
    matrix_lr: Annotated[float, typer.Option(help="Learning rate of matrices (Muon).")] = 2e-3,
    vector_lr: Annotated[float, typer.Option(help="Learning rate of LM heads and norms (AdamW).")] = 1e-3,
    weight_decay: Annotated[
        float, typer.Option(help="Of matrices, LM heads and embeddings; norms and biases have none.")
    ] = 0.0,
    warmup_steps: Annotated[
        int, typer.Option(help="Steps in which learning rates rise to what they are to be.")
    ] = 20,
    constant_share: Annotated[
        float, typer.Option(help="Share of the steps after which learning rates begin to fall, to zero.")
    ] = 0.3,
    clip_norm: Annotated[float, typer.Option(help="Norm that gradients of a step are cut to.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of initial weights, order and samples.")] = 0,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        typer.Option(help="Of the target and of products; auto: bfloat16 on a GPU, float32 on a CPU."),
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    layout: Annotated[
        Literal["published", "speculators"],
        typer.Option("--format", help="Layout of eagle3 and mtp: of their authors, or of vLLM's library."),
    ] = "published",
    stored_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights in OUT.")
    ] = "float32",
    checkpoint_every: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="Seconds between checkpoints, behind whole steps (draft_model: 20).",
        ),
    ] = 180.0,
    eval_texts: Annotated[
        int, typer.Option(min=0, help="Excerpts of held-out texts to measure acceptance behind; 0: none.")
    ] = 16,
    debug: DebugOption = False,
) -> None:
    """Train a drafter for a target; the same command goes on with an interrupted run.

    medusa2 and layerskip make another target, with its drafter: what is served then is exact to that one.

    A twentieth of the documents is held out. At the end acceptance by position is measured behind excerpts
    of these, printed, and written to OUT/acceptance.json.

    Examples:

        drafthouse train medusa --target models/demo/target --data texts/ --out medusa

        drafthouse train eagle3 --target models/demo/target --data chats.jsonl --out eagle3 --keep-hidden

        drafthouse train mtp --target models/demo/target --data texts/ --samples 2000 --out mtp

        drafthouse train medusa2 --target models/demo/target --data texts/ --heads-first 300 --out medusa2

        drafthouse train draft_model --target models/demo/target --data texts/ --num-layers 2 --out draft
    """
    import torch

    from training.drafters import train as recipes
    from training.drafters.options import TrainOptions
    from training.drafters.recipe import DrafterRecipe

    if threads is not None:
        torch.set_num_threads(threads)
    recipe = DrafterRecipe(
        method=method,
        steps=steps,
        row_length=row_length,
        batch_rows=batch_rows,
        accumulate=accumulate,
        depth=depth,
        decay=decay,
        num_layers=num_layers,
        num_modules=num_modules,
        has_prefix_layer=prefix_layer,
        draft_vocab_size=draft_vocab_size,
        fused_layers=_integers(fused_layers),
        is_v31=v31,
        feature_noise=feature_noise,
        classification_weight=classification_weight,
        target_rate=target_rate,
        heads_first=heads_first,
        heads_weight=heads_weight,
        target_loss=target_loss,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        layer_dropout=layer_dropout,
        exit_scale=exit_scale,
        exit_layer=exit_layer,
        divergence=divergence,
        on_policy=on_policy,
        muon_lr=matrix_lr,
        adamw_lr=vector_lr,
        weight_decay=weight_decay,
        warmup_steps=warmup_steps,
        constant_share=constant_share,
        clip_norm=clip_norm,
        seed=seed,
    )
    options = TrainOptions(
        target=target,
        data=tuple(data),
        out=out,
        work=_beside(out) if work is None else work,
        dtype=dtype,
        device=device,
        samples=samples,
        sample_temperature=sample_temperature,
        start_from=start_from,
        allow_pickled_weights=allow_pickled_weights,
        keeps_hidden=keep_hidden,
        hidden_folder=hidden_folder,
        layout=layout,
        stores_adapter=store == "adapter",
        stored_dtype=stored_dtype,
        checkpoint_every_s=checkpoint_every,
        eval_texts=eval_texts,
    )
    report = recipes.train_drafter(recipe, options)
    console = Console(stderr=True, highlight=False)
    if "acceptance" in report:
        console.print(_table(report["acceptance"]))
    console.print(f"trained {report['elapsed_s']:.0f} s -> {out}", soft_wrap=True)


def _beside(out: Path) -> Path:
    """Where checkpoints lie unless something else is said; `.` has no name to put anything behind."""
    named = out if out.name else out.absolute()
    return named.with_name(f"{named.name}-work")


def _integers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--fused-layers must be numbers with commas between, got {text!r}") from None


def _table(acceptance: dict[str, dict[str, object]]) -> Table:
    """Share of rounds that accept the first, second, ... draft."""
    table = Table(title="share of rounds that accept draft 1, 2, ...")
    for column in ("temperature", "tokens per round", "by position"):
        table.add_column(column)
    for temperature, measured in acceptance.items():
        reached = measured.get("reached")
        shares = " ".join(f"{share:.3f}" for share in reached) if isinstance(reached, list) else "-"
        table.add_row(temperature, str(measured.get("tokens_per_round", "-")), shares)
    return table

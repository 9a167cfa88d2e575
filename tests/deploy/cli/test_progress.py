"""Progress on terminals and in files."""

from __future__ import annotations

import io

from rich.console import Console

from deploy.cli.progress import shown


def test_a_file_gets_each_stage_once() -> None:
    file = io.StringIO()
    with shown(Console(file=file), "placing") as show:
        for stage in ("placing", "loading", "loading", "checking"):
            show(stage)
    assert file.getvalue() == "placing ...\nloading ...\nchecking ...\n"


def test_percentages_alone_make_no_line_in_a_file() -> None:
    file = io.StringIO()
    with shown(Console(file=file), "placing") as show:
        for stage in ("compiling target 2 %", "compiling target 37 %", "compiling draft 40 %"):
            show(stage)
    assert file.getvalue() == "placing ...\ncompiling target 2 % ...\ncompiling draft 40 % ...\n"


def test_a_terminal_gets_a_spinner_that_leaves_nothing_behind() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True)
    with shown(console, "placing") as show:
        show("loading")
    console.print("ready")
    text = file.getvalue()
    assert "loading" in text
    assert text.split("\x1b[2K")[-1].strip() == "ready"

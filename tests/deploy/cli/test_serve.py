"""What `drafthouse serve` makes of its configuration and of the command line, without Ray."""

from __future__ import annotations

from pathlib import Path

from deploy.cli.serve import ServeOptions, _configured


def test_what_the_command_line_says_leaves_the_rest_as_it_was_given(tmp_path: Path) -> None:
    """What was not given stays so: some defaults depend on it."""
    file = tmp_path / "config.yaml"
    file.write_text("target: {model: /m}\nhttp: {resume_window_s: 0, host: 127.0.0.2}\n")
    options = ServeOptions(
        config=file,
        host=None,
        port=8001,
        is_insecure_allowed=False,
        num_cpus=None,
        address=None,
        show_logs=False,
    )
    http = _configured(options).http
    assert (http.host, http.port, http.resume_window_s) == ("127.0.0.2", 8001, 0)
    assert http.model_fields_set == {"host", "port", "resume_window_s"}

"""The `retrain` command in this process."""

from typing import Any

from typer.testing import CliRunner, Result

from retrain.cli.main import app


def invoke(*words: Any, code: int | None = None, **options: Any) -> Result:
    """Run the command with these words: its exit code, stdout and stderr; `code` is what it must end with."""
    result = CliRunner().invoke(app, [str(word) for word in words], **options)
    assert code in (None, result.exit_code), f"{result.output}\n{result.exception}"
    return result

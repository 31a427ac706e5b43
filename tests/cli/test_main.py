import importlib
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from retrain import __version__
from retrain.cli import main
from retrain.cli.main import COMMANDS, app
from retrain.errors import DataError


@pytest.fixture
def command(monkeypatch):
    """Put a function behind the command `try`."""

    def install(function):
        module = type(sys)("module_of_the_test")
        module.function = function
        monkeypatch.setitem(sys.modules, "module_of_the_test", module)
        monkeypatch.setitem(main.COMMANDS, "try", ("module_of_the_test:function", "Try."))

    return install


def test_help_lists_every_command_and_imports_none():
    script = (
        "import sys\nfrom retrain.cli.main import app\nsys.argv = ['retrain', '--help']\n"
        "try:\n    app()\nexcept SystemExit as end:\n    print('exit', end.code)\n"
        "heavy = {'torch', 'pydantic', 'rich', 'transformers', 'numpy', 'retrain.registry'}\n"
        "heavy |= {'retrain.cli.config_commands'}\n"
        "print('imported', sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert all(f"  {name} " in result.stdout for name in COMMANDS)
    assert "exit 0" in result.stdout
    assert "imported []" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_and_explains_itself(name):
    module, _, function = COMMANDS[name][0].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert f"retrain {name}" in result.output


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"retrain {__version__}\n")


@pytest.mark.parametrize(("words", "found"), [("retrain testb", "testbed"), ("retrain train --resu", "--resume")])
def test_the_shell_completes_commands_and_options(words, found):
    command = "from retrain.cli.main import app; app(prog_name='retrain')"
    asked = {"_RETRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([sys.executable, "-c", command], env=os.environ | asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [found])


def test_no_command_shows_the_help():
    assert "Commands" in CliRunner().invoke(app, []).output


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(app, ["vlidate"])
    assert result.exit_code == 2
    assert "vlidate" in result.stderr


def test_an_error_of_the_package_is_a_message_and_its_exit_code(command):
    def fails() -> None:
        error = DataError("rows.jsonl:3: no prompt")
        error.add_note("a note")
        raise error

    command(fails)
    result = CliRunner().invoke(app, ["try"])
    assert result.exit_code == 3
    assert result.stderr == "rows.jsonl:3: no prompt\na note\n"


def test_debugging_shows_the_traceback(command, monkeypatch):
    def fails() -> None:
        raise DataError("x")

    command(fails)
    monkeypatch.setenv("RETRAIN_DEBUG", "1")
    assert isinstance(CliRunner().invoke(app, ["try"]).exception, DataError)


def test_ctrl_c_exits_130(command):
    def waits() -> None:
        raise KeyboardInterrupt

    command(waits)
    result = CliRunner().invoke(app, ["try"])
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_main_runs_the_app(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["retrain", "--version"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_python_m_retrain_is_the_command():
    shown = subprocess.run([sys.executable, "-m", "retrain", "--version"], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, f"retrain {__version__}\n")

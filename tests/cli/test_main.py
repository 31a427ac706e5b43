import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from retrain import __version__
from retrain.cli import main
from retrain.cli.arguments import Json
from retrain.cli.main import app, command_names, load_command
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


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        (["--help"], "torch pydantic rich transformers numpy retrain.registry retrain.cli.config_commands"),
        (
            ["validate", "configs/quickstart.toml"],
            "torch transformers numpy asyncio retrain.campaign.plan.campaign_schema",
        ),
    ],
)
def test_a_command_imports_nothing_that_it_does_not_need(words, unneeded):
    script = (
        "import sys\nfrom retrain.cli.main import app\n"
        f"sys.argv = {['retrain', *words]}\ntry:\n    app()\nexcept SystemExit as end:\n    print('exit', end.code)\n"
        f"print('imported', sorted(set({unneeded.split()}) & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.endswith("exit 0\nimported []\n")
    if words == ["--help"]:
        assert all(f"  {name} " in result.stdout for name in command_names())
    else:
        assert "valid\n" in result.stdout


@pytest.mark.parametrize("name", command_names())
def test_every_command_exists_and_explains_itself(name):
    assert callable(load_command(name))
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert f"retrain {name}" in result.output


def test_options_may_be_written_with_underscores(command):
    def function(n_min: int = 1, *, as_json: Json = False):
        print(n_min, as_json)

    command(function)
    for option in ("--n-min", "--n_min"):
        assert CliRunner().invoke(app, ["try", option, "4", "--json"]).output == "4 True\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package with these lines as its entry points of commands, and this module `own_commands`."""

    def install(points: str, source: str) -> None:
        (tmp_path / "own_commands.py").write_text(source)
        metadata = tmp_path / "own-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Name: own\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[retrain.commands]\n{points}")
        monkeypatch.syspath_prepend(tmp_path)
        main.installed.cache_clear()

    yield install
    monkeypatch.undo()
    main.installed.cache_clear()


GREET = """
def greet(name: str, loud: bool = False):
    \"\"\"Greet somebody.\"\"\"
    print(f"HELLO {name}" if loud else f"hello {name}")
"""


def test_an_installed_package_adds_commands(package):
    package("greet = own_commands:greet\ndata.greet = own_commands:greet\n", GREET)
    listed = CliRunner().invoke(app, ["--help"]).stdout
    assert "  greet          Greet somebody.\n" in listed
    assert "  data greet     Greet somebody.\n" in listed
    assert CliRunner().invoke(app, ["greet", "you", "--loud"]).stdout == "HELLO you\n"
    assert CliRunner().invoke(app, ["data", "greet", "you"]).stdout == "hello you\n"
    assert "prepare" in CliRunner().invoke(app, ["data", "--help"]).stdout


def test_an_installed_package_replaces_no_command(package):
    package("train = own_commands:greet\n", GREET)
    assert "Train a model" in CliRunner().invoke(app, ["train", "--help"]).stdout


def test_a_broken_command_of_a_package_names_the_package_and_leaves_the_others(package):
    package("greet = own_commands:greet\n", "import not_there\n")
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0
    assert "cannot be used" in listed.stdout
    done = CliRunner().invoke(app, ["greet", "you"])
    assert done.exit_code == 1
    assert 'command "greet" of own: importing own_commands:greet raised ModuleNotFoundError' in done.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [("retrain testb", "testbed"), ("retrain train --resu", "--resume"), ("retrain init --template json", "jsonl")],
)
def test_the_shell_completes_commands_and_options(words, found):
    command = "from retrain.cli.main import app; app(prog_name='retrain')"
    asked = {"_RETRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([sys.executable, "-c", command], env=os.environ | asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [found])


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(app, ["vlidate"])
    assert result.exit_code == 2
    assert 'no such command "vlidate"; did you mean "validate"?' in result.stderr


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


def test_python_m_retrain_is_the_command():
    shown = subprocess.run([sys.executable, "-m", "retrain", "--version"], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, f"retrain {__version__}\n")

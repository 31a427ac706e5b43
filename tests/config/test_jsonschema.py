import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retrain import registry
from retrain.config.jsonschema import json_schema
from retrain.config.schema import Config
from tests.commands import invoke


def test_every_section_and_every_component_table_is_in_the_schema():
    schema = json_schema()
    assert {"extends", *Config.model_fields, *registry.table_names()} == set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_a_components_table_has_its_bounds_and_defaults():
    hicra = json_schema()["properties"]["hicra"]
    assert hicra["properties"]["alpha"]["maximum"] == 1
    assert hicra["properties"]["alpha"]["default"] == 0.2
    assert "transform hicra" in hicra["description"]


ROOT = Path(__file__).parents[2]
TAPLO = shutil.which("taplo", path=str(Path(sys.executable).parent))
"""What checks and completes TOML in editors, as a command; `pip install taplo`, which [dev] does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as `retrain init` leaves it."""
    folder = tmp_path_factory.mktemp("editor")
    assert invoke("init", str(folder / "run.toml")).exit_code == 0
    return folder


def checked(folder, *texts):
    """What taplo says of files with the `#:schema` line of `init`, and its exit code."""
    for number, text in enumerate(texts):
        (folder / f"{number}.toml").write_text(f"#:schema retrain.schema.json\n{text}")
    done = subprocess.run(
        [str(TAPLO), "check", "run.toml", *(f"{number}.toml" for number in range(len(texts)))],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(TAPLO is None, reason="taplo is not installed: pip install taplo")
def test_an_editor_accepts_what_is_shipped(folder):
    shipped = [*ROOT.glob("configs/**/*.toml"), *ROOT.glob("campaigns/*.toml")]
    code, said = checked(folder, *(file.read_text() for file in shipped))
    assert code == 0, said


@pytest.mark.skipif(TAPLO is None, reason="taplo is not installed: pip install taplo")
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('[algorithm]\nadvantage_mode = "gpro"\n', "gpro"),
        ('[training]\nlr = "a"\n', '"a" is not of type "number"'),
        ("[trainign]\nlr = 1e-5\n", "trainign"),
        ('[[rewards]]\nname = "exakt"\n', "exakt"),
        ("[hicra]\nalpha = 2.0\n", "maximum of 1"),
    ],
)
def test_an_editor_marks_a_mistake(folder, wrong, said):
    right = '[algorithm]\nadvantage_mode = "my_file.mine"\n["my_file.mine"]\nwidth = 2\n'
    code, printed = checked(folder, right, wrong)
    assert (code, said in printed, "1.toml" in printed, "0.toml" in printed) == (1, True, True, False), printed

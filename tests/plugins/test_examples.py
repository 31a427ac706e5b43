"""The examples do what they say, and every TOML in plugins/ and in the documentation is valid."""

import re
from pathlib import Path

import pytest
import torch

from plugins.decorated import fading, progress
from plugins.my_reward import brevity
from retrain import compute_composable_advantages
from retrain.config.load import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def credit(rewards, planning=None, **modes):
    logprobs = [[-0.5, -1.0] for _ in rewards]
    masks = planning or [[0, 0] for _ in rewards]
    return compute_composable_advantages(rewards, logprobs, masks, **modes).token_advs


def test_plain_advantage():
    name = "plugins.my_advantages.hipa_like_advantages"
    assert credit([1.0, 0.0], advantage_mode=name) == [[1.0, 1.0], [-1.0, -1.0]]


def test_advantage_with_params():
    name = "plugins.my_advantages.asymmetric_advantages"
    params = {"scale": 2.0, "penalty": 0.25}
    assert credit([1.0, 0.0], advantage_mode=name, advantage_params=params) == [[1.0, 1.0], [-0.25, -0.25]]


def test_context_transform():
    name = "plugins.my_transform.my_transform"
    assert credit([1.0, 0.0], transform_mode=name, transform_params={"scale": 3.0}) == [[1.5, 1.5], [-1.5, -1.5]]


def test_whole_algorithm(tmp_path):
    from plugins.my_algorithm import my_algorithm
    from retrain import TransformContext

    ctx = TransformContext(
        [], [[-0.5, -1.0]] * 2, [[1, 0], [0, 1]], params={"execution_weight": 0.0}, rewards=[1.0, 0.0]
    )
    assert my_algorithm(ctx).token_advs == [[0.5, 0.0], [-0.0, -0.5]]


def test_decorated_transform_reads_its_signal():
    mask = torch.tensor([[False, True, True, True, True], [False, True, False, False, False]])
    assert progress(mask).tolist() == [[0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 1.0, 0.0, 0.0, 0.0]]
    spread = fading(mask.float(), progress(mask), floor=0.3)
    assert torch.allclose(spread[0], torch.tensor([0.0, 0.75, 0.5, 0.3, 0.3]))


def test_reward():
    assert brevity("so 12", "12") == 1.0
    assert brevity("so 12" + " " * 35, "12") == 0.5
    assert brevity("so 13", "12") is None


@pytest.mark.parametrize("file", sorted((ROOT / "plugins").glob("*.toml")), ids=lambda file: file.stem)
def test_example_configurations_are_valid(file):
    assert not load(file).warnings


@pytest.mark.parametrize("block", BLOCKS)
def test_configurations_in_the_documentation_are_valid(block, tmp_path):
    file = tmp_path / "block.toml"
    file.write_text(block)
    load(file, ('plugins.search_paths=["plugins"]',))

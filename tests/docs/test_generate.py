"""The generated pages name every key and component there is."""

import pytest

from docs import generate
from docs.docstrings import arguments
from retrain.campaign.plan.campaign_schema import Campaign
from retrain.config.schema import Config
from retrain.registry import components

pytestmark = pytest.mark.repository

GENERATE = vars(generate)


@pytest.fixture(scope="module")
def configuration():
    return GENERATE["configuration_page"]()


def test_every_section_and_key_is_described(configuration):
    for section, field in Config.model_fields.items():
        assert f"[{section}]" in configuration
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"| `{key}` |" in configuration
    assert "| `seed` | integer >= 0 | `0` | Seed of every random number in the run. |" in configuration


def test_campaigns_are_described(configuration):
    for key in Campaign.model_fields:
        assert f"| `{key}` |" in configuration.partition("## `[campaign]`")[2]
    assert "## `[[campaign.conditions]]`" in configuration


def test_every_component_is_described():
    page = GENERATE["components_page"]()
    for part in components():
        assert part.source != "built-in" or f"### `{part.name}`" in page


def test_every_parameter_has_a_meaning():
    for page in (GENERATE["components_page"](), GENERATE["configuration_page"]()):
        assert not [line for line in page.splitlines() if line.endswith("|  |")]


def test_meanings_come_from_the_docstring():
    text = """Sum.

    Args:
        rewards: [N] float; group_ids: [N] int.
        low, high: the bounds,
            both included.
    Returns:
        other: not an argument.
    """
    assert arguments(text) == {
        "": "",
        "rewards": "[N] float",
        "group_ids": "[N] int.",
        "low": "The bounds, both included.",
        "high": "The bounds, both included.",
    }


@pytest.mark.parametrize("page", sorted((generate.ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_generated_blocks_are_as_the_code_has_them(page):
    """`python -m docs.generate` rewrites them."""
    text = page.read_text()
    assert generate.rewritten(text) == text


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ("keys warmup steps", "| `steps` |"),
        ("keys critic gamma lam", "| `gamma`, `lam` | `1` |"),
        ("keys judge base_url", "| `base_url` | required |"),
        ("keys model.lora r", "| `r` |"),
        ("commands", "| `retrain validate FILE` | Check a configuration"),
        ("metrics first", "| `grad/norm` | norm of the gradient before clipping | Steady is good."),
        ("metrics of mu", "| `mix/mu` |"),
        ("exit-codes", "| 130 | Ctrl-C; after"),
        ("presets", "| `dapo` | DAPO"),
        ("recipes methods", "| `configs/methods/"),
        ("formulas loss.gspo", "| loss `gspo` | <code>-min(s_t * A_t, clip(s_t,"),
    ],
)
def test_a_block_has_what_its_first_line_asks_for(block, line):
    assert line in generate.rewritten(f"<!-- generated: {block} -->\n<!-- end -->\n")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"type": "integer", "minimum": 1}, "integer >= 1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number > 0, <= 1"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
        ({"enum": ["a", "b"]}, '`"a"`, `"b"`'),
        ({"type": "array", "items": {"type": "string"}}, "list of text"),
    ],
)
def test_types_read_as_words(entry, words):
    assert GENERATE["kind"](entry) == words

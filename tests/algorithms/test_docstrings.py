import re
import subprocess
import sys

import pytest

from retrain.registry import components

pytestmark = pytest.mark.repository

DOCUMENTED = [c for kind in ("advantage", "transform", "loss") for c in components(kind) if c.source == "built-in"]


@pytest.mark.parametrize("component", DOCUMENTED, ids=lambda c: f"{c.kind}-{c.name}")
def test_a_formula_its_arguments_and_an_arxiv_id(component):
    text = component.target.__doc__
    paragraphs = text.split("\n\n")
    assert re.search(r"[-+*/|]|min|max", paragraphs[1]), "no formula in the second paragraph"
    assert "Args:" in text
    assert "Returns:" in text
    assert re.search(r"References:.*arXiv:\d{4}\.\d{5}", text, re.S)
    for name in component.schema.model_fields:
        assert name == "weight" or name in text, f"parameter {name} is not explained"


def test_importing_the_package_does_not_import_torch():
    code = "import sys, retrain.algorithms; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The files that one step of training enters, against the list on the page "Architecture".

The spine is what a reader follows: every file of the package with a function that runs in the trainer's process during
a step, in the order of first entry, but for

- components that the TOML chose by name (an advantage, a loss, a task ...), except the engine. The planning mask has a
  package of its own, `algorithms/planning`;
- the model: what the decoder computes of a token, chosen by the model's family as a component is by name, and what the
  trainer puts into its modules;
- definitions and mechanisms without flow: `types` with the layout of a batch and the row that a reward gets, the parts
  of a run, of a collector and of a loaded model, `protocols`, `errors`, `registry`, `system`;
- formulas: `functional`.
"""

import inspect
import re
import sys
from pathlib import Path

import pytest

import retrain
from retrain import registry

PACKAGE = Path(retrain.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
DEFINITIONS = (
    "types.py",
    "training/layout.py",
    "training/model/loading.py",
    "training/model/packing.py",
    "rewards/signatures.py",
    "run/run_context.py",
    "run/collectors/collector.py",
    "protocols.py",
    "errors.py",
    "registry",
    "training/distributed/sharded_tensors.py",
)
NOT_FLOW = (*DEFINITIONS, "system", "functional", "algorithms/planning")
PUT_IN = (
    *("training/model/lora.py", "training/model/abilities.py", "training/model/packed_attention.py"),
    "training/cpu_kernels.py",
)
MODELS = (
    *("engines/capability.py", "engines/embedded/prefix_cache.py"),
    *("engines/embedded/fused.py", "engines/embedded/general.py"),
    *PUT_IN,
)
MOST = 20


class Trace:
    """Notes the files that the second step enters: events of the first and the second begin and end it."""

    def __init__(self):
        self.files = []

    def __call__(self, event, details):
        if event == "step":
            sys.setprofile(self.enter if details["step"] == 0 else None)

    def enter(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents and path not in self.files:
            self.files.append(path)


def components():
    """Files that define a component, but for engines."""
    kinds = [kind for kind in registry.KINDS if kind != "engine"]
    found = [registry.find(kind, name) for kind in kinds for name in registry.names(kind)]
    return {Path(inspect.getsourcefile(inspect.unwrap(component.target)) or "") for component in found}


@pytest.mark.slow
def test_one_step_enters_the_files_that_the_page_lists(train):
    trace = Trace()
    options = ("training.max_steps=3", "eval.problems=0", "checkpoint.every=0", "reward_pool.workers=1")
    try:
        train(*options, "logging.rollouts_every=0", observe=trace)
    finally:
        sys.setprofile(None)
    left_out = components()
    inside = [str(file.relative_to(PACKAGE)) for file in trace.files if file not in left_out]
    spine = [file for file in inside if not file.startswith((*NOT_FLOW, *MODELS))]
    section = PAGE.read_text().split("## One step of training")[1].split("\n## ")[0]
    assert spine == re.findall(r"^\d+\. `([\w/.]+)`", section, re.MULTILINE)
    assert len(spine) <= MOST

"""The model card: what a saved model is, how it was made and how well it does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain import __version__

_CURVE = ("step", "accuracy", "ci_low", "ci_high", "greedy_accuracy", "avg_tokens")
_POINTS = 12


@dataclass(frozen=True)
class Card:
    """What a model card tells.

    Attributes:
        name: of the run.
        base: what `[model] path` said.
        task: name of the task.
        config: the TOML file of the run.
        evaluations: rows of eval.jsonl in order; may be empty.
        steps: optimizer steps of RL; 0 after a warm start alone.
        warmup_steps: supervised steps before them.
        license: SPDX id; None takes "other" for a base model, whose own license holds on.
        adapter: the directory also has the LoRA adapter in `adapter/`.
        extra: more facts for the table, in order.
    """

    name: str
    base: str
    task: str
    config: str
    evaluations: Sequence[Mapping[str, Any]] = ()
    steps: int = 0
    warmup_steps: int = 0
    license: str | None = None
    adapter: bool = False
    extra: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def made_here(self) -> bool:
        """Training started from weights that this run made, and that nobody else has."""
        return _is_builtin(self) or self.warmup_steps > 0


def write_card(directory: Path, card: Card) -> Path:
    """Write the card to `directory/README.md`, where tools and the hub look for it."""
    path = directory / "README.md"
    path.write_text(render_card(card), encoding="utf-8")
    return path


def render_card(card: Card) -> str:
    """The card as Markdown with YAML front matter. Strings in it are quoted as JSON, which YAML reads."""
    sections = [
        _front_matter(card),
        f"# {card.name}\n\n{_summary(card)}",
        "## Training\n\n" + _facts(card),
        *([f"## Held-out evaluation\n\n{_results(card)}"] if card.evaluations else []),
        "## Use\n\n" + _usage(card),
        f"## Configuration\n\n~~~toml\n{card.config.strip()}\n~~~",
        "## License\n\n" + _license_section(card),
    ]
    return "\n\n".join(sections) + "\n"


def render_adapter_card(card: Card, base: str) -> str:
    """The card of the adapter alone, as Markdown. `base` is what it was trained on; "../base" is beside its folder."""
    beside = base.startswith("..")
    place, where = f"`{base}`", json.dumps(base)
    if beside:
        place, where = "in the folder `base` beside this one", f'adapter / "{base}"'
    return f"""---
library_name: peft
{"" if beside else f"base_model: {json.dumps(base)}{chr(10)}"}tags: ["retrain", "lora"]
---

# {card.name}, the adapter

{_summary(card)} These are the LoRA adapter's weights alone, in peft's format and float32. Its base model is
{place}; the folder above this one holds the merged model.

```python
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM

adapter = Path("path/to/this/directory")
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({where}), adapter)
```
"""


def _front_matter(card: Card) -> str:
    algorithm = ["reinforcement-learning"] if card.steps else []
    lines = [
        f"license: {json.dumps(card.license or _default_license(card))}",
        *([] if _is_builtin(card) else [f"base_model: {json.dumps(card.base)}"]),
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: {json.dumps(['retrain', *algorithm, card.task])}",
    ]
    return "\n".join(["---", *lines, "---"])


def _summary(card: Card) -> str:
    ways = [f"{card.warmup_steps} supervised steps"] if card.warmup_steps else []
    ways += [f"{card.steps} steps of reinforcement learning"] if card.steps else []
    made = "trained with " + " and ".join(ways) if ways else "not trained further"
    return f"`{card.base}`, {made} on the task `{card.task}` by retrain {__version__}."


def _facts(card: Card) -> str:
    facts = {"base model": f"`{card.base}`", "task": f"`{card.task}`", "supervised steps": str(card.warmup_steps)}
    facts |= {"reinforcement learning steps": str(card.steps)} | dict(card.extra)
    return _table(("", ""), [(name, value) for name, value in facts.items()])


def _results(card: Card) -> str:
    """The curve as a table of at most a dozen rows, first and last included, and what was measured."""
    rows, last = card.evaluations, card.evaluations[-1]
    count = min(_POINTS, len(rows))
    chosen = [rows[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]
    columns = [name for name in _CURVE if any(name in row for row in rows)]
    cells = [[_number(row.get(name)) for name in columns] for row in chosen]
    sampled = (
        f"{last.get('problems', '?')} held-out problems, {last.get('samples', '?')} completion(s) each, "
        f"temperature {last.get('temperature', '?')}; the interval is 95%, over problems."
    )
    return f"{sampled}\n\n{_table(columns, cells)}"


def _usage(card: Card) -> str:
    code = (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")\n```'
    )
    base = "`base/`" if card.made_here else f"`{card.base}`"
    adapter = f"\n\nThe adapter alone, in peft's format, is in `adapter/`, for {base}; the weights here have it merged."
    return code + (adapter if card.adapter else "")


def _license_section(card: Card) -> str:
    if _is_builtin(card):
        return f"{card.license or _default_license(card)}. The weights were initialized at random and trained here."
    return f"The license of `{card.base}` applies to these weights, which derive from it."


def _default_license(card: Card) -> str:
    return "apache-2.0" if _is_builtin(card) else "other"


def _is_builtin(card: Card) -> bool:
    return card.base.startswith("builtin:")


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

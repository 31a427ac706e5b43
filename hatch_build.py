"""Build hook: a wheel contains the recipes of `configs/`, and the pages of `docs/` for `retrain help`.

An editable installation reads them from the clone. Copies in its site-packages would outlive `pip uninstall`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RecipesHook(BuildHookInterface[Any]):
    """Adds recipes and pages to wheels, except editable ones."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add them to the files of the build; `version` is "standard" or "editable"."""
        if version == "standard":
            build_data["force_include"]["configs"] = "retrain/cli/templates/recipes"
            for page in Path(self.root, "docs").glob("*.md"):
                build_data["force_include"][f"docs/{page.name}"] = f"retrain/cli/templates/docs/{page.name}"

"""Build hook: a wheel contains the recipes of `configs/`, and docs/skill.md for `retrain init --skill`.

An editable installation reads them from the clone. Copies in its site-packages would outlive `pip uninstall`.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RecipesHook(BuildHookInterface[Any]):
    """Adds the recipes to wheels, except editable ones."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder to the files of the build; `version` is "standard" or "editable"."""
        if version == "standard":
            build_data["force_include"]["configs"] = "retrain/cli/templates/recipes"
            build_data["force_include"]["docs/skill.md"] = "retrain/cli/templates/SKILL.md"

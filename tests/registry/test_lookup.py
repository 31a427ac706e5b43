"""Where dotted paths are looked for."""

import pytest

from retrain import registry
from retrain.errors import ComponentError


def module(folder, name, value):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(f"def f(rewards):\n    return [{value}.0] * len(rewards)\n")


def test_plugins_are_searched_after_the_directory_itself_and_before_search_paths(cwd):
    module(cwd / "plugins", "looked_up_below", 1)
    module(cwd / "plugins", "looked_up_twice", 1)
    module(cwd, "looked_up_twice", 2)
    module(cwd / "others", "looked_up_below", 3)
    others = [cwd / "others"]
    assert registry.find("advantage", "looked_up_below.f", others).target([0]) == [1.0]
    assert registry.find("advantage", "looked_up_twice.f").target([0]) == [2.0]
    with pytest.raises(ComponentError, match=rf"searched in {cwd}, {cwd}/plugins\)") as caught:
        registry.find("advantage", "looked_up_nowhere.f")
    assert "plugins/" in caught.value.fix


def test_the_examples_of_the_repository_do_not_hide_a_folder_of_the_same_name(tmp_path, monkeypatch):
    registry.find("advantage", "plugins.my_advantages.hipa_like_advantages")
    monkeypatch.chdir(tmp_path)
    module(tmp_path / "plugins", "looked_up_dotted", 1)
    assert registry.find("advantage", "plugins.looked_up_dotted.f").target([0]) == [1.0]


def test_a_decorator_without_parentheses_is_refused():
    with pytest.raises(ComponentError, match=r'@transform needs a name; write @transform\("NAME"\)'):
        registry.transform(lambda advantages: advantages)

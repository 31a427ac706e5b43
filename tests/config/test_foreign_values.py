from retrain.config.foreign_values import in_components
from retrain.config.load import load

FAR = """
from retrain.registry import advantage

@advantage("far_away", reaches={"url": "connects to this server"})
def far(rewards, group_ids, *, url: str | None = None):
    return rewards
"""


def test_a_parameter_beside_a_dotted_path_is_named_once_by_the_key_that_set_overrides(cwd):
    (cwd / "far_code.py").write_text(FAR)
    text = '[algorithm]\nadvantage_mode = "far_code.far"\n[algorithm.advantage_params]\nurl = "http://there"\n'
    (cwd / "run.toml").write_text(text)
    paths = [value.path for value in in_components(load("run.toml"))]
    assert paths == [("algorithm", "advantage_params", "url")]

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import retrain
from retrain.config import schema
from retrain.config.schema import Config

SECTIONS = [
    model
    for model in vars(schema).values()
    if isinstance(model, type) and issubclass(model, schema.Section) and model is not schema.Section
]


def test_every_key_is_read_by_someone():
    """A key that nothing reads is a promise that is not kept."""
    package = Path(retrain.__file__).parent
    code = "\n".join(file.read_text() for file in package.rglob("*.py") if file != Path(schema.__file__))
    unread = [
        f"{section.__name__}.{key}"
        for section in SECTIONS
        for key in section.model_fields
        # As an attribute, by its name, or as a parameter of the component that the section's keys are given to.
        if not re.search(rf"\.{key}\b|\"{key}\"|^        {key}: ", code, re.M)
        and not re.search(rf"\bself\.{key}\b", Path(schema.__file__).read_text())
        and section is not schema.Lora
    ]
    assert not unread


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_says_what_it_means(section):
    if section is not Config:
        assert [key for key, info in section.model_fields.items() if not info.description] == []


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Config().training.seed = 3


def test_a_model_with_trained_weights_has_gentler_defaults():
    builtin, real = Config(), Config.model_validate({"model": {"path": "some/model"}})
    assert (builtin.optimizer.lr, builtin.warmup.steps) == (2e-4, 1000)
    assert (real.optimizer.lr, real.warmup.steps) == (1e-6, 0)


def test_adapters_of_a_trained_model_have_a_larger_learning_rate():
    lora = Config.model_validate({"model": {"path": "some/model", "lora": {}}})
    assert (lora.optimizer.lr, lora.warmup.steps) == (1e-4, 0)
    random = Config.model_validate({"model": {"lora": {}}})
    assert random.optimizer.lr == Config().optimizer.lr
    assert Config.model_validate({"model": {"path": "some/model", "lora": None}}).optimizer.lr == 1e-6
    written = Config.model_validate({"model": {"path": "some/model", "lora": {}}, "optimizer": {"lr": 2e-6}})
    assert written.optimizer.lr == 2e-6


def test_what_is_written_wins_over_the_gentler_defaults():
    data = {"model": {"path": "some/model"}, "optimizer": {"lr": 1e-3}, "warmup": {"steps": 5, "seed": 2}}
    config = Config.model_validate(data)
    assert (config.optimizer.lr, config.warmup.steps, config.warmup.seed) == (1e-3, 5, 2)
    assert data["optimizer"] == {"lr": 1e-3}


def test_models_are_closed_and_strict():
    for section in SECTIONS:
        assert issubclass(section, BaseModel)
        assert section.model_config.get("extra") == "forbid"
        assert section.model_config.get("strict")

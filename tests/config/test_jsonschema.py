from retrain import registry
from retrain.config.jsonschema import json_schema
from retrain.config.schema import Config


def resolve(schema, node):
    return schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node


def test_every_section_and_every_component_table_is_in_the_schema():
    schema = json_schema()
    assert set(Config.model_fields) | set(registry.table_names()) == set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_a_components_table_has_its_bounds_and_defaults():
    hicra = json_schema()["properties"]["hicra"]
    assert hicra["properties"]["alpha"]["maximum"] == 1
    assert hicra["properties"]["alpha"]["default"] == 0.2
    assert "transform hicra" in hicra["description"]


def test_sections_are_described_and_name_their_components():
    schema = json_schema()
    algorithm = resolve(schema, schema["properties"]["algorithm"])["properties"]
    assert "grpo" in algorithm["advantage_mode"]["examples"]
    assert {"none", "gtpo_sepa", "gtpo"} <= set(algorithm["transform_mode"]["examples"])
    training = resolve(schema, schema["properties"]["training"])["properties"]
    assert training["batch_size"]["description"] == "Prompts per step."


def test_aliases_are_allowed_where_they_are_documented():
    schema = json_schema()
    assert resolve(schema, schema["properties"]["training"])["properties"]["lr"]["description"]
    assert "strategic_grams" in resolve(schema, schema["properties"]["logging"])["properties"]
    assert "strategic_grams" in schema["properties"]["hicra"]["properties"]

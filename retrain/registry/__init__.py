"""Registry of components, found by registered name, entry point or dotted path, in this order."""

from retrain.registry.component import KINDS as KINDS
from retrain.registry.component import Component as Component
from retrain.registry.component import Kind as Kind
from retrain.registry.component import ParameterError as ParameterError
from retrain.registry.kinds import *  # noqa: F403 - every row of the table
from retrain.registry.lookup import bind as bind
from retrain.registry.lookup import components as components
from retrain.registry.lookup import find as find
from retrain.registry.lookup import is_dotted as is_dotted
from retrain.registry.lookup import is_registered as is_registered
from retrain.registry.lookup import names as names
from retrain.registry.lookup import table_names as table_names
from retrain.registry.lookup import table_schema as table_schema
from retrain.registry.traits import Finding as Finding

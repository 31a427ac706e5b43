"""Names to components: registered name, then entry point, then dotted path. Built-ins have no privileges."""

from retrain.registry.component import KINDS, Bound, Component
from retrain.registry.decorators import (
    advantage,
    algorithm,
    engine,
    executor,
    filter,
    loss,
    reduction,
    register,
    reward,
    signal,
    task,
    tracker,
    transform,
    uncertainty,
)
from retrain.registry.lookup import components, find, names, table_names, table_schema

__all__ = [
    "KINDS",
    "Bound",
    "Component",
    "advantage",
    "algorithm",
    "components",
    "engine",
    "executor",
    "filter",
    "find",
    "loss",
    "names",
    "reduction",
    "register",
    "reward",
    "signal",
    "table_names",
    "table_schema",
    "task",
    "tracker",
    "transform",
    "uncertainty",
]

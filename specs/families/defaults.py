"""Defaults of transformers' config classes, where transformers is installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any


def declared_defaults(model_type: str) -> Mapping[str, Any]:
    """Fields that transformers' config class of a model type declares, with their defaults.

    Only declarations are read: no config is made, no file is loaded, no remote code is run. Values
    that a class computes from other fields are therefore missing.

    Args:
        model_type: as in ``config.json``; for a nested config the inner config's.

    Returns:
        Empty without transformers, or with one that does not know the model type.
    """
    if importlib.util.find_spec("transformers") is None:
        return {}
    try:
        auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
        config_class = auto.CONFIG_MAPPING[model_type]
    except (ImportError, AttributeError, KeyError):
        return {}
    if dataclasses.is_dataclass(config_class):
        return {
            field.name: field.default
            for field in dataclasses.fields(config_class)
            if field.default is not dataclasses.MISSING
        }
    # Before transformers 5 a config class is written as a constructor.
    parameters = inspect.signature(config_class.__init__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }

"""Every setting, built once from defaults, YAML, environment, record and call arguments, then passed down frozen.

The only reader of `os.environ`. Precedence, strongest first: call arguments, the record's `econfig`, environment,
YAML (`aweagent/configs/NAME.yaml`, with `extends:`), defaults.
"""

from __future__ import annotations

from orchestrator.settings.environment import (
    as_url,
    cache_dir,
    database_url,
    entry_database_url,
    maintenance_database_url,
    secret,
    variable,
)
from orchestrator.settings.loading import (
    CONFIG_DIR,
    ECONFIG,
    ENVIRONMENT,
    agent_type_of,
    config_names,
    load,
    stored,
)
from orchestrator.settings.sections import (
    AgentSettings,
    AgentType,
    GradingSettings,
    LimitSettings,
    LlmSettings,
    RetrySettings,
    SandboxSettings,
    Section,
    Settings,
    ToolName,
    TrainingSettings,
)

__all__ = [
    "CONFIG_DIR",
    "ECONFIG",
    "ENVIRONMENT",
    "AgentSettings",
    "AgentType",
    "GradingSettings",
    "LimitSettings",
    "LlmSettings",
    "RetrySettings",
    "SandboxSettings",
    "Section",
    "Settings",
    "ToolName",
    "TrainingSettings",
    "agent_type_of",
    "as_url",
    "cache_dir",
    "config_names",
    "database_url",
    "entry_database_url",
    "load",
    "maintenance_database_url",
    "secret",
    "stored",
    "variable",
]

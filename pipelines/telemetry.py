"""No telemetry: environment settings that must be set before libraries are imported."""

import os

NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "WANDB_ERROR_REPORTING": "false",
}


def no_telemetry() -> None:
    for name, value in NO_TELEMETRY.items():
        os.environ.setdefault(name, value)

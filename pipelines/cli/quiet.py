"""Environment settings that must be set before Prefect is imported, and Prefect server detection."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFECT = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # would disturb the live display
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",  # an ephemeral server would be gone before anyone could look at it
}


def quiet_prefect() -> None:
    for name, value in PREFECT.items():
        os.environ.setdefault(name, value)


def prefect_server() -> str | None:
    """Return the URL of the configured Prefect server, if any. Follows Prefect's lookup order without its 2 s import."""
    found = [
        os.environ,
        _dotenv(Path(".env")),
        _flat(_toml(Path("prefect.toml"))),
        _flat(_toml(Path("pyproject.toml")).get("tool", {}).get("prefect", {})),
        _profile(),
    ]
    return next((str(settings["PREFECT_API_URL"]) for settings in found if settings.get("PREFECT_API_URL")), None)


def _dotenv(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    from dotenv import dotenv_values

    return dotenv_values(path)


def _profile() -> Mapping[str, Any]:
    """Return the settings of Prefect's active profile; its default profiles name no server unless one is selected."""
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    found = _toml(Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml"))
    return found.get("profiles", {}).get(os.environ.get("PREFECT_PROFILE") or found.get("active"), {})


def _flat(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Map `[api] url` of a settings file to its environment variable."""
    return {"PREFECT_API_URL": settings.get("api", {}).get("url")}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}

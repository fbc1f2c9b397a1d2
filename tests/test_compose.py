"""The compose file for teams. No test starts it: that needs a container engine."""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


def test_the_compose_file_starts_the_prefect_of_our_lock_with_a_database_and_keeps_no_secret():
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    database, server = compose["services"]["postgres"], compose["services"]["prefect"]
    lock = (ROOT / "requirements/cpu.txt").read_text()
    (version,) = [line.split("==")[1] for line in lock.splitlines() if line.startswith("prefect==")]
    assert f"FROM prefecthq/prefect:{version}-python3.11" in server["build"]["dockerfile_inline"]
    assert "sqlalchemy[asyncio]>=2.0,<2.1" in server["build"]["dockerfile_inline"]  # else no schedule fires
    url = server["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"]
    assert url.startswith("postgresql+asyncpg://prefect:${PREFECT_DB_PASSWORD:?") and url.endswith("@postgres:5432/prefect")
    assert database["environment"]["POSTGRES_PASSWORD"].startswith("${PREFECT_DB_PASSWORD:?")
    assert server["depends_on"] == {"postgres": {"condition": "service_healthy"}} and database["healthcheck"]
    used = {volume.partition(":")[0] for service in (database, server) for volume in service["volumes"]}
    assert used == set(compose["volumes"])
    assert server["environment"]["PREFECT_SERVER_API_AUTH_STRING"] is None  # handed through where it is set, else not set at all

"""The compose file for teams, as text; `pipelines/test_compose_parts.py` starts what it names."""

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from prefect.server.database.configurations import AsyncPostgresConfiguration

ROOT = Path(__file__).resolve().parents[1]
PASSWORD, KEY = (f"${{{name}:?set it, e.g. in .env}}" for name in ("PREFECT_DB_PASSWORD", "S3_PASSWORD"))


def test_the_compose_file_starts_the_prefect_of_our_lock_with_a_database_and_keeps_no_secret():
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    database, server, store, worker = (compose["services"][name] for name in ("postgres", "prefect", "s3", "worker"))
    lock = (ROOT / "requirements/cpu.txt").read_text()
    (version,) = [line.split("==")[1] for line in lock.splitlines() if line.startswith("prefect==")]
    assert f"FROM prefecthq/prefect:{version}-python3.11" in server["build"]["dockerfile_inline"]
    assert "sqlalchemy[asyncio]>=2.0,<2.1" in server["build"]["dockerfile_inline"]  # else no schedule fires
    assert server["environment"]["PGPASSWORD"] == database["environment"]["POSTGRES_PASSWORD"] == PASSWORD
    assert server["depends_on"] == {"postgres": {"condition": "service_healthy"}} and database["healthcheck"]
    assert store["environment"]["AWS_SECRET_ACCESS_KEY"] == worker["environment"]["AWS_SECRET_ACCESS_KEY"] == KEY
    assert worker["depends_on"].keys() == {"prefect", "s3"} and server["healthcheck"] and store["healthcheck"]
    used = {volume.partition(":")[0] for service in (database, server, store, worker) for volume in service["volumes"]}
    assert used == {*compose["volumes"], ".."}
    for service, name in ((server, "PREFECT_SERVER_API_AUTH_STRING"), (worker, "PREFECT_API_AUTH_STRING")):
        assert service["environment"][name] is None  # handed through where it is set, else not set at all


def test_a_password_of_any_letters_reaches_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in no URL, which @ and / would break: Prefect's way to the database reads it from the environment."""
    password, heard = "a@b/c:d%e#é", bytearray()

    def ask_for_it(listener: socket.socket) -> None:
        with listener.accept()[0] as client:
            client.recv(8)  # may we speak TLS?
            client.sendall(b"N")
            client.recv(4096)  # user and database
            client.sendall(struct.pack("!cii", b"R", 8, 3))  # AuthenticationCleartextPassword
            heard.extend(client.recv(4096))

    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    given = {name: str(value).replace(PASSWORD, password) for name, value in compose["services"]["prefect"]["environment"].items()}
    monkeypatch.setenv("PGPASSWORD", given.get("PGPASSWORD", ""))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=ask_for_it, args=(listener,), daemon=True).start()
        url = given["PREFECT_API_DATABASE_CONNECTION_URL"].replace("@postgres:5432", f"@127.0.0.1:{listener.getsockname()[1]}")
        with suppress(Exception):  # nobody answers any more
            asyncio.run(_connect(AsyncPostgresConfiguration(connection_url=url)))
    assert heard[5:-1].decode() == password


async def _connect(database: AsyncPostgresConfiguration) -> None:
    async with (await database.engine()).connect():
        pass

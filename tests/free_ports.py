"""Ports for servers that bind them later, and again when they are started anew."""

import secrets
import socket
from contextlib import suppress

PORTS = range(20_000, 32_768)
"""Below those that Linux gives to whoever asks for any (`net.ipv4.ip_local_port_range`): nobody is given them meanwhile."""


def free_ports(number: int) -> list[int]:
    taken: dict[int, socket.socket] = {}
    while len(taken) < number:
        port = secrets.choice(PORTS)
        with suppress(OSError):
            taken[port] = socket.create_server(("127.0.0.1", port))
    for one in taken.values():
        one.close()
    return [*taken]

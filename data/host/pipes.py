"""Waiting for pipes."""

import select


def readable(pipe: int, seconds: float) -> bool:
    """Whether a pipe becomes readable, or ends, within `seconds`.

    Uses `poll`, because `select` rejects descriptors above 1,023, which occur when many shards are mapped.
    """
    return _ready(pipe, select.POLLIN, seconds)


def writable(pipe: int, seconds: float) -> bool:
    """Whether a pipe accepts bytes, or has no reader any more, within `seconds`."""
    return _ready(pipe, select.POLLOUT, seconds)


def _ready(pipe: int, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(1000 * seconds))

"""Waiting for pipes."""

import select


def readable(pipe: int, seconds: float) -> bool:
    """Whether a pipe becomes readable, or ends, within `seconds`.

    Uses `poll`, because `select` rejects descriptors above 1,023, which occur when many shards are mapped.
    """
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * seconds))

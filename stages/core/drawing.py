"""Draw the policies of a pool that answer a prompt.

Draws depend only on hashes of (seed, prompt id, label), not on the order of prompts or policies or on other prompts. Adding a policy to the
pool changes only the draws that include it (rendezvous hashing, Thaler & Ravishankar 1998).
"""

from collections.abc import Collection, Sequence

from pedigree.configs.base.frozen import digest


def draw_policies(
    labels: Sequence[str],
    prompt_id: str,
    *,
    seed: int,
    count: int | None,
    on_policy: Collection[str] = (),
    share: float | None = None,
) -> list[str]:
    """The policies that answer one prompt, in the order of `labels`.

    Args:
        count: number of policies that answer; None for all.
        on_policy: labels of the policy to be trained.
        share: probability that one of `on_policy` answers along with `count` - 1 others; otherwise `count` others answer. None: they are
            drawn like all others.
    """
    if count is None:
        return list(labels)
    if share is None:
        chosen = _first(count, labels, prompt_id, seed)
    else:
        own = [label for label in labels if label in on_policy]
        others = [label for label in labels if label not in on_policy]
        taken = int(uniform(seed, "on_policy", prompt_id) < share)
        chosen = _first(taken, own, prompt_id, seed) | _first(count - taken, others, prompt_id, seed)
    return [label for label in labels if label in chosen]


def uniform(*parts: str | int) -> float:
    """A number in [0, 1) that depends only on the parts."""
    return int(digest(list(parts))[:12], 16) / 16**12


def _first(count: int, labels: Sequence[str], prompt_id: str, seed: int) -> set[str]:
    """`count` of the labels: a uniform draw without replacement, because their hashes are independent."""
    return set(sorted(labels, key=lambda label: digest([seed, "policy", prompt_id, label]))[:count])

"""The tree of an ancestry as lines."""

from collections.abc import Iterator

from pedigree.pipelines.lineage.ancestry import Ancestor


def walk(tree: Ancestor) -> Iterator[tuple[int, Ancestor]]:
    """(depth, artifact) in preorder; no recursion, which a long ancestry exceeds."""
    waiting = [(0, tree)]
    while waiting:
        depth, found = waiting.pop()
        yield depth, found
        waiting += [(depth + 1, parent) for parent in reversed(found.parents)]

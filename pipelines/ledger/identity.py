"""Compare, by key, what a stage would be made from now with what its existing artifact was made from.

The key of a stage covers everything that defines its result, so it decides: the key in the record is compared with the key under the
recipe as this run loaded it, for the stage and all its ancestors. File hashes alone can agree and still be wrong if a recipe changes
during a run.
"""

from contextlib import suppress
from pathlib import Path

from pedigree.configs.base.paths import place_of, written_of
from pedigree.configs.base.project import Project
from pedigree.configs.language.graph import Edge, Graph, Node
from pedigree.data.artifacts.artifacts import ArtifactError, Input, Record, stage_key
from pedigree.data.artifacts.source_files import KnownHashes
from pedigree.data.store.hashing import Beat, silent
from pedigree.pipelines.ledger.equal import StageInputs
from pedigree.pipelines.ledger.ledger import Ledger
from pedigree.pipelines.ledger.transfers import RemoteError

HASHES = KnownHashes()
"""Cache for project files, whose hashes are needed for every descendant stage."""


class InputReplaced(Exception):
    """An artifact was made under another key than this run's recipe requires: another version of the recipe made it."""

    def __init__(self, address: str, key: str, wanted: str) -> None:
        super().__init__(
            f"{address} was made under key {key[:12]}, but this run's recipe requires {wanted[:12]}: another version of the recipe, or "
            "another run of it, has replaced it"
        )


class Identities:
    """Keys of a graph's stages at one moment, from the records of their inputs, whose files need not be local.

    Each key is computed and each record is read once, so take new `Identities` after any wait.
    """

    def __init__(self, project: Project, graph: Graph, ledger: Ledger) -> None:
        self.project, self.graph, self.ledger = project, graph, ledger
        self._needs: dict[str, StageInputs] = {}
        self._records: dict[str, Record] = {}

    def standing(self, node: Node, beat: Beat = silent) -> tuple[list[str], bool]:
        """Why a stage must run, as short sentences, and whether its files are only in the remote.

        Without a reason it is up to date: by its entry in `dvc.lock`, its files and its key. `beat` reports the hashing of large files.

        Raises:
            RemoteError: undecidable, because something is missing here and the remote does not provide it.
        """
        reasons = self.ledger.reasons(node, beat)
        remote = bool(reasons) and self.ledger.is_away(node, reasons)
        if reasons and not remote:
            return reasons, False
        try:
            record, wanted = self._record(node.address), self.need(node, beat).key
            if record.key != wanted:
                raise InputReplaced(node.address, record.key, wanted)
            changed = self.ledger.changed_code(node)
        except InputReplaced as error:
            return [str(error)], False
        except ArtifactError as error:
            return [f"cannot determine its inputs: {error}"], False
        return changed, remote and not changed

    def need(self, node: Node, beat: Beat = silent) -> StageInputs:
        """Compute the identity of a stage. `beat` reports the hashing of large project files.

        Raises:
            ArtifactError: an input or a project file is missing.
            InputReplaced: an input, or one of its ancestors, was not made by the recipe.
            RemoteError: an input's record is not here, and the remote does not provide it.
        """
        wanted = self.graph.ancestors([node.address])
        for address, above in self.graph.nodes.items():  # parents first
            if address in wanted and address not in self._needs and above is not node:
                with suppress(ArtifactError, RemoteError):  # cannot be made here: its descendants' records state its content
                    self._needs[address] = self._need(above, beat, recorded=True)
        if node.address not in self._needs:
            self._needs[node.address] = self._need(node, beat)
        return self._needs[node.address]

    def assume(self, address: str, record: Record) -> None:
        """Compute the keys of descendants as if the stage had this record."""
        self._records[address] = record

    def _need(self, node: Node, beat: Beat, recorded: bool = False) -> StageInputs:
        """`recorded`: take inputs that cannot be found from the stage's own record."""
        inputs = tuple(self._input(node, edge, recorded) for edge in node.edges)
        folders: dict[str, dict[str, Path]] = {}
        for edge in node.edges:
            folders.setdefault(edge.port, {})[edge.label] = self.project.artifact(edge.source)
        files = {str(name): self._source(node, name, beat) for name in node.files}
        edges = [(given.port, given.label, given.content) for given in inputs]
        key = stage_key(node.kind, node.declaration.version, node.config.model_dump(mode="json"), edges, files)
        return StageInputs(key, inputs, folders, files)

    def _source(self, node: Node, name: str, beat: Beat) -> str:
        """SHA-256 of a source; of one that is not on this machine, as the stage's record has it."""
        place = place_of(self.project.root, name)
        try:
            memory = None if self.ledger.repository.looking else self.project.private / "hashes"
            return HASHES.sha256(place, beat, memory)
        except FileNotFoundError:
            if found := self.ledger.source_files(node.address).get(name):
                return found
        raise ArtifactError(f"{written_of(name)} does not exist: add it, or change the config that names it")

    def _input(self, node: Node, edge: Edge, recorded: bool) -> Input:
        try:
            record = self._record(edge.source)
        except (ArtifactError, RemoteError) as error:
            if recorded:
                for given in self._record(node.address).inputs:
                    if (given.port, given.label) == (edge.port, edge.label):
                        return given
            kind = RemoteError if isinstance(error, RemoteError) else ArtifactError
            raise kind(f"input {edge.source}: {error}") from error
        wanted = self._needs.get(edge.source)
        if wanted is not None and record.key != wanted.key:
            raise InputReplaced(edge.source, record.key, wanted.key)
        return Input(port=edge.port, label=edge.label, content=record.content, producer=record.id)

    def _record(self, address: str) -> Record:
        if address not in self._records:
            self._records[address] = self.ledger.record(address)
        return self._records[address]

"""Trackers of an execution profile: where a run reports metrics and states while it runs (docs/trackers.md)."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from pedigree.configs.base.frozen import Frozen

Text = Annotated[str, Field(min_length=1, max_length=1000)]


class TensorBoard(Frozen):
    """Event files, which `tensorboard --logdir FOLDER` shows."""

    type: Literal["tensorboard"]
    folder: Text
    """Relative to the project; each stage gets `RECIPE/STAGE/RUN` in it."""


class Wandb(Frozen):
    """Weights & Biases. The API key is read from the environment (WANDB_API_KEY) or from `wandb login`."""

    type: Literal["wandb"]
    project: Text
    """Project on the server."""
    entity: Text | None = None
    """Team or user that owns the project; by default the user's own."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: write to `.pedigree/wandb` for a later `wandb sync`."""


class Mlflow(Frozen):
    """An MLflow tracking server or database. Credentials are read from the environment (MLFLOW_TRACKING_TOKEN, ...)."""

    type: Literal["mlflow"]
    uri: Text
    """`http://HOST:PORT`, or `sqlite:///FILE`, relative to the project."""
    experiment: Text = "pedigree"
    """Created if it does not exist."""

    @field_validator("uri")
    @classmethod
    def _refuse_credentials(cls, value: str) -> str:
        if "@" in value:  # it is shown in logs
            raise ValueError("uri must not name a user or password: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        return value


class Trackio(Frozen):
    """trackio's database on this machine, in the folder TRACKIO_DIR of the environment; `trackio show` shows it."""

    type: Literal["trackio"]
    project: Text
    """Project in the database."""


class Prometheus(Frozen):
    """A file for the textfile collector of Prometheus' node_exporter."""

    type: Literal["prometheus"]
    folder: Text
    """The collector's folder, relative to the project; each recipe gets `pedigree_RECIPE.prom` in it."""


class JsonLog(Frozen):
    """A file of JSON lines, one for each new state of a stage, for collectors of logs."""

    type: Literal["json"]
    file: Text
    """Relative to the project; lines are appended."""


Tracker = Annotated[TensorBoard | Wandb | Mlflow | Trackio | Prometheus | JsonLog, Field(discriminator="type")]

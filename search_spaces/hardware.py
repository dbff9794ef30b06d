"""PoolSpec: machines that look alike, and the environment in which ranks run on them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from search_spaces.whole import GpusPerNode, Nodes

GPU_SELECTION = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that name the GPUs which a process sees. Ray sets them for each agent; one value for all nodes is wrong on some."""


class RankEnvironment(BaseModel):
    """How the ranks of a pool are started: the user's own Python and its surroundings, never ours.

    Attributes:
        python: Interpreter that has torch and megatron-core: a path, or a name on the ranks' PATH; none = autotune's own.
        setup: Shell file that bash sources before the interpreter starts (module load, conda activate).
        container: Command prefix that runs what follows inside a container and passes stdin, stdout and stderr through, e.g.
            ["apptainer", "exec", "--nv", "image.sif"].
        container_stop: Command that ends that container where killing the prefix does not, run after the last rank has ended.
        env: Environment variables of the ranks; they win over the node's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    python: str | None = None
    setup: str | None = None
    container: tuple[str, ...] = ()
    container_stop: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _leaves_gpus_to_each_node(cls, env: dict[str, str]) -> dict[str, str]:
        if named := [name for name in GPU_SELECTION if env.get(name)]:
            raise ValueError(
                f"{named[0]}={env[named[0]]} would be the same on every node (each gets its GPUs from Ray; the study's `gpus` "
                "chooses those of one machine)"
            )
        return env


class TelemetrySpec(BaseModel):
    """How power, heat and throttling of a pool's nodes are measured.

    Attributes:
        vendors: Whose GPUs are read: nvidia, amd; none = those of the pool's kind of GPU.
        gpus: GPUs that trials are charged for, by number or UUID; none = those that Ray gives to the ranks.
        period_s: Period of power, energy, clocks and throttle counters.
        wall_power_period_s: Period of `wall_power_command`; the meter's own period where that is longer.
        env: Environment of the process that measures, and of it alone, such as ROCM_PATH or LD_LIBRARY_PATH.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    vendors: tuple[Literal["nvidia", "amd"], ...] | None = None
    gpus: tuple[str, ...] = ()
    period_s: Annotated[float, Field(ge=0.01, le=10.0)] = 0.05
    wall_power_period_s: Annotated[float, Field(ge=1.0, le=900.0)] = 1.0
    env: dict[str, str] = Field(default_factory=dict)


class PoolSpec(BaseModel):
    """A set of like nodes. One study is one model on one pool at one node count.

    Attributes:
        name: Name in reports; the Ray label `autotune-pool=<name>` marks its nodes unless `labels` says otherwise.
        gpu: GPU type, or "cpu" (ranks over gloo).
        nodes: Node count of a trial; a list is several, each planned and tuned by itself and then compared.
        other_nodes: What follows the first node count of a list.
        gpus_per_node: GPUs of each node; on a "cpu" pool the number of ranks.
        network: Link between the nodes; none = the one usual for the GPU's generation.
        node_overhead_w: Watts at the wall of a node besides its GPUs; none = the usual share of their TDP.
        psu_efficiency: Watts that the power supplies give over those they take; none = the usual one.
        labels: Ray node labels that select the nodes.
        environment: Where and how ranks run.
        usd_per_gpu_hour: Price of a GPU (a rank on CPU) for an hour; reports and the money budget use it.
        power_limit_command: The site's own command that sets a GPU's power limit, with `{gpu}` (index), `{uuid}` and `{watts}`;
            none = the vendor's library, which needs the right to.
        wall_power_command: Command that tells a node's watts at the wall when it runs there, as words or as one string that no
            shell reads, e.g. [ipmitool, dcmi, power, reading]; none = they are estimated. See `autotune.telemetry.wall`.
        telemetry: How power, heat and throttling are measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    gpu: str = "cpu"
    nodes: Nodes = 1
    other_nodes: tuple[Nodes, ...] = ()
    gpus_per_node: GpusPerNode
    network: str | None = None
    node_overhead_w: NonNegativeFloat | None = None
    psu_efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    environment: RankEnvironment = RankEnvironment()
    usd_per_gpu_hour: PositiveFloat | None = None
    power_limit_command: str | None = None
    wall_power_command: tuple[str, ...] = ()
    telemetry: TelemetrySpec = TelemetrySpec()

    @field_validator("power_limit_command")
    @classmethod
    def _says_which_gpu_and_how_much(cls, command: str | None) -> str | None:
        try:
            names = {name for _, name, _, _ in Formatter().parse(command or "{gpu}{watts}") if name is not None}
        except ValueError as error:
            raise ValueError(f"{error} (write {{watts}} and {{gpu}} or {{uuid}}, and braces of its own doubled)") from None
        if "watts" not in names or not names & {"gpu", "uuid"} or names - {"watts", "gpu", "uuid"}:
            raise ValueError("needs {watts} and {gpu} or {uuid} (e.g. sudo nvidia-smi -i {gpu} -pl {watts})")
        return command

    @field_validator("wall_power_command", mode="before")
    @classmethod
    def _as_words(cls, command: Any) -> Any:
        try:
            return tuple(shlex.split(command)) if isinstance(command, str) else command
        except ValueError as error:
            raise ValueError(f"cannot be split into words: {str(error).lower()}") from None

    @model_validator(mode="before")
    @classmethod
    def _several_node_counts(cls, data: Any) -> Any:
        """A list of node counts is its first and the others."""
        if not isinstance(data, Mapping) or not isinstance(data.get("nodes"), list | tuple):
            return data
        counts = data["nodes"]
        whole = all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts)
        if not counts or not whole or len(set(counts)) < len(counts):
            raise ValueError(f"nodes={counts} are no node counts (give a whole number or a list of different ones, e.g. [4, 6, 8])")
        return {**data, "nodes": counts[0], "other_nodes": tuple(counts[1:])}

    @property
    def node_counts(self) -> tuple[int, ...]:
        """All node counts, in the order given."""
        return (self.nodes, *self.other_nodes)

    def at_each_node_count(self) -> tuple[PoolSpec, ...]:
        """One pool of the same name for each node count."""
        return tuple(self.model_copy(update={"nodes": count, "other_nodes": ()}) for count in self.node_counts)

    @property
    def world_size(self) -> int:
        """Ranks of a trial: nodes x GPUs per node."""
        return self.nodes * self.gpus_per_node

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Torch device type of the ranks; ROCm answers to "cuda" too."""
        return "cpu" if self.gpu == "cpu" else "cuda"

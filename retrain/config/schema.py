"""One frozen model per TOML section. Bounds, defaults and descriptions here are the documentation.

Tables that are not sections (`[gtpo]`, `[sepa]` ...) belong to components; their schema is the component's signature.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from retrain.config.sections.heldout import Eval, StopWhen
from retrain.config.sections.problems import Environment, Mixed, MixedTask, Reward, RewardPoolSettings, TaskSettings
from retrain.config.sections.section import Array, Count, Decay, Natural, Params, Positive, Problems, Section, Seed
from retrain.system.model_paths import RANDOM_MODEL

RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"

REAL_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "warmup": {"steps": 0}}
"""What the defaults are for every model but "builtin:tiny": its weights are trained already."""


class Lora(Section):
    """`[model.lora]`: train low-rank adapters instead of all weights."""

    r: Count = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """Scale: the adapter's output is multiplied by alpha / r."""
    dropout: Decay = 0.0
    """Dropout on the adapter's input; anything but 0 makes sampler and trainer disagree."""
    target_modules: str | Annotated[tuple[str, ...], Array] = "all-linear"
    """Names of the layers that get an adapter, or "all-linear"."""


class Model(Section):
    """`[model]`: what is trained."""

    path: Annotated[str, Field(min_length=1)] = RANDOM_MODEL
    """A directory, a name on the model hub, "builtin:tiny" (random weights) or "builtin:smollm2" (fetched before)."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the matrix products; the trained weights, logits and the loss stay float32.
    "auto" is bfloat16 on a GPU or on a CPU that multiplies it in hardware, else float32."""
    lora: Lora | None = None
    """Present: train LoRA adapters. Absent: train all weights."""
    quantization: Literal["nf4"] | None = None
    """"nf4" holds the linear layers that LoRA freezes in 4 bits, all but the head; needs `[model.lora]`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Render prompts with the tokenizer's chat template; "auto": if it has one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class RolloutSettings(Section):
    """`[rollout]`: how completions are sampled."""

    engine: Annotated[str, Field(min_length=1)] = "auto"
    """A registered engine, the dotted path of one, or "auto": the fastest that can run the model."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; must be 1 while training, where sampler and trainer share one distribution."""
    top_k: Natural = 0
    """Sample among the k likeliest tokens; 0 switches it off, and must while training."""
    resample: Literal["none", "uninformative"] = "none"
    """Sample other prompts in place of groups that `[algorithm] filter` drops (default: no advantage at all)."""
    max_resample: Count = 4
    """Rounds of such resampling per step; after that the step trains on what there is."""
    overlap: Natural = 0
    """k samples the batch of k steps later while the trainer updates: k steps stale. 1 hides all that can be hidden."""
    mask_truncated: bool = False
    """Leave completions that ran into max_tokens out of the loss."""
    parity_every: Natural = 10
    """Steps between checks that sampler and trainer compute the same log-probs; 0 switches them off."""
    parity_tolerance: Positive | None = None
    """Largest mean difference per token in nats; unset: 0.001 where both multiply in float32, else 0.15."""

    @cached_property
    def resamples(self) -> bool:
        """Whether other prompts take the place of groups that are dropped."""
        return self.resample != "none"


class Algorithm(Section):
    """`[algorithm]`: from rewards to the advantage of every token, and from that to the loss."""

    advantage_mode: Annotated[str, Field(min_length=1)] = "grpo"
    """Episode advantage: a registered name or a dotted path."""
    transform_mode: str | Annotated[tuple[str, ...], Array] = "none"
    """Token transforms: "none", one name, a documented chain such as "gtpo_sepa", or a list of names."""
    algorithm_mode: str | None = None
    """A preset, laid under this file's keys; or, for advantage and transforms, a registered or dotted algorithm."""
    uncertainty_kind: Annotated[str, Field(min_length=1)] = "surprisal"
    """The uncertainty of a token that transforms read."""
    advantage_params: Params = {}
    """Parameters of an advantage_mode given as a dotted path."""
    transform_params: Params = {}
    """Parameters of the dotted paths in transform_mode."""
    params: Params = {}
    """Parameters of an algorithm_mode given as a dotted path."""
    reduction: Annotated[str, Field(min_length=1)] = "token_mean"
    """How losses per token become one number."""
    filter: Annotated[str, Field(min_length=1)] = "uninformative"
    """Which groups are worth training on."""


class Loss(Section):
    """One `[[loss]]` entry; the loss is the weighted sum, and a term of weight 0 is not computed."""

    name: Annotated[str, Field(min_length=1)]
    """A registered loss term or the dotted path of one."""
    weight: float | None = None
    """Factor of the term; unset: the term's table, then the term's own default."""
    params: Params = {}
    """Parameters of the term."""


class Expert(Section):
    """`[expert]`: worked answers to imitate beside the rollouts, read when a loss term trains on expert rows."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """A .jsonl or .parquet file; a row is {"messages": [...]}, the assistant's turn last, or prompt and completion."""
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a step's rows, batch_size x group_size, that an expert wrote; they take the place of prompts."""
    all_assistant_turns: bool = False
    """Train on every turn of the assistant instead of the last alone; needs a chat template."""
    same_prompts: bool = False
    """Take rows with the prompts of the step's rollouts first; the others in their order."""


class OptimizerSettings(Section):
    """`[optimizer]`"""

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """adamw8bit keeps a byte for each moment. Muon takes the weight matrices; the rest is left to AdamW."""
    lr: Positive = 2e-4
    """Learning rate at its peak. Default 2e-4 for builtin:tiny and 1e-6 for any other model."""
    betas: Annotated[tuple[Decay, Decay], Array] = (0.9, 0.95)
    """Decay of the first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    warmup_steps: Natural = 0
    """Steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after that, until max_steps."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""


class Training(Section):
    """`[training]`"""

    seed: Seed = 0
    """Every random draw of the run derives from it."""
    max_steps: Natural = 200
    """Steps of sampling and training; 0 evaluates and saves the warm-started model."""
    batch_size: Count = 16
    """Prompts per step."""
    group_size: Count = 8
    """Completions per prompt."""
    max_tokens: Count = 64
    """Response budget in tokens, end-of-sequence included."""
    curriculum: Annotated[str, Field(min_length=1)] | None = None
    """A registered curriculum, which chooses the next problems by how earlier ones went, or the dotted path of one."""
    max_prompt_tokens: Count | None = None
    """Prompts that are longer are left out of training; unset: only those that the model has no room for."""
    temperature: Positive = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same."""
    stop_when: StopWhen | None = None
    """End the run early: { metric = "eval/accuracy", above = 0.95 }."""
    epochs: Count = 1
    """Passes over each step's batch."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    micro_batch_tokens: Count = 16384
    """Tokens per forward and backward, on a CPU at most 2048; changes memory and speed, never the result."""
    threads: Literal["auto"] | Natural = "auto"
    """CPU threads of the trainer; "auto": OMP_NUM_THREADS where it is set, else by the cores and the model's size, and
    1 with a GPU. 0: as "auto", whatever the size."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """"auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1"."""


class Distributed(Section):
    """`[distributed]`: a run on several ranks (`retrain train --ranks`); without ranks nothing of it applies."""

    shard: Literal["auto", "full", "none"] = "auto"
    """"full" spreads the weights over the ranks; "none" holds all on each; "auto" is full where that pays."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """"optimizer" keeps its moments in the processor's memory, without ranks as well; "all" whatever is sharded."""
    timeout_s: Positive = 600.0
    """Seconds a rank waits for the others in an update; ten times as long while rollouts are sampled and scored."""


class Warmup(Section):
    """`[warmup]`: supervised steps on the task's worked solutions before RL."""

    steps: Natural = 1000
    """Optimizer steps; 0 for none. Default 1000 for builtin:tiny and 0 for any other model."""
    batch_size: Count = 16
    """Solutions per step."""
    lr: Positive = 1.5e-3
    """Learning rate at its peak; it decays to 0."""
    warmup_steps: Natural = 50
    """Steps over which the learning rate rises."""
    problems: Annotated[Problems, Field(ge=1)] = 20000
    """Problems whose solutions are imitated, over and over."""
    seed: Seed = 1
    """Its own seed, so that runs with different `[training] seed` start from the same weights."""
    cache: bool = True
    """Reuse the weights of an earlier warm-up with the same settings."""


class Checkpoint(Section):
    """`[checkpoint]`"""

    every: Natural = 50
    """Steps between checkpoints; 0 saves at the end only."""
    keep: Count = 2
    """Newest checkpoints that stay on disk."""
    best: Annotated[str, Field(pattern=r"^eval/.")] | None = None
    """Also keep the state whose evaluation was best by this share, such as "eval/accuracy" or "eval/NAME/pass@4"."""
    on_save_error: Literal["stop", "warn"] = "stop"
    """What a full disk does to the run."""
    resume: Literal["never", "auto"] = "never"
    """Default of `--resume`: "auto" goes on from the newest valid checkpoint of the run directory."""


class Logging(Section):
    """`[logging]`"""

    name: Annotated[str, Field(pattern=RUN_NAME)] | None = None
    """Name of the run directory: letters, digits, dot, dash and underscore. Unset: the name of the TOML file."""
    dir: Annotated[str, Field(min_length=1)] = "runs"
    """Where run directories are made."""
    rollouts_every: Natural = 10
    """Steps between steps whose rollouts are stored; 0 stores none."""
    observe: Annotated[tuple[str, ...], Array] = ()
    """Columns to compute for their metrics alone, such as "sepa_lambda". A campaign adds what any condition reads."""
    trackers: Annotated[tuple[str, ...], Array] = ()
    """Sinks of metrics besides metrics.jsonl, by registered name or dotted path."""
    completions: Natural = 0
    """Completions that trackers get of each step whose rollouts are stored."""


class Plugins(Section):
    """`[plugins]`"""

    search_paths: Annotated[tuple[str, ...], Array] = ()
    """Directories where dotted paths are looked up, after the current one."""


class Config(Section):
    """A whole run. Every default is the vetted setting of the builtin model and task."""

    model: Model = Model()
    task: TaskSettings = TaskSettings()
    tasks: Annotated[tuple[MixedTask, ...], Array] = ()
    environment: Environment = Environment()
    environments: Annotated[tuple[Mixed, ...], Array] = ()
    rewards: Annotated[tuple[Reward, ...], Array, Field(min_length=1)] = (Reward(name="exact"),)
    reward_pool: RewardPoolSettings = RewardPoolSettings()
    rollout: RolloutSettings = RolloutSettings()
    algorithm: Algorithm = Algorithm()
    loss: Annotated[tuple[Loss, ...], Array, Field(min_length=1)] = (
        Loss(name="ppo_clip"),
        Loss(name="kl"),
        Loss(name="entropy"),
    )
    expert: Expert = Expert()
    optimizer: OptimizerSettings = OptimizerSettings()
    training: Training = Training()
    distributed: Distributed = Distributed()
    warmup: Warmup = Warmup()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    plugins: Plugins = Plugins()

    @model_validator(mode="before")
    @classmethod
    def _real_model_defaults(cls, data: Any) -> Any:
        """Defaults that depend on whether the model starts from random weights."""
        match data:
            case {"model": {"path": str(path)}} if path != RANDOM_MODEL:
                given = [name for name in REAL_MODEL_DEFAULTS if isinstance(data.get(name, {}), Mapping)]
                return {**data, **{name: REAL_MODEL_DEFAULTS[name] | dict(data.get(name, {})) for name in given}}
            case _:
                return data

"""Pydantic models of the TOML sections. The reference pages are made from their bounds, defaults and docstrings.

Other tables (`[gtpo]`, `[sepa]` ...) belong to components; their schema is the component's signature.
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

# A leading dash would look like an option of a command, and a leading dot would hide the directory.
RUN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"

REAL_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "warmup": {"steps": 0}}
"""Defaults that change for every model but "builtin:tiny", because those models are pretrained."""
LORA_DEFAULTS: dict[str, dict[str, Any]] = {"optimizer": {"lr": 1e-4}}
"""Further defaults that change with `[model.lora]`, for every model but "builtin:tiny"."""


class Lora(Section):
    """`[model.lora]`: train low-rank adapters instead of all weights."""

    r: Count = 16
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """Scaling factor: the adapter's output is multiplied by alpha / r."""
    dropout: Decay = 0.0
    """Dropout probability on the adapter's input. Only the trainer applies it, so above 0 its log-probs differ from the
    sampler's."""
    target_modules: str | Annotated[tuple[str, ...], Array] = "all-linear"
    """"all-linear": every linear layer but the head gets an adapter; fused experts and routers get none, and a line
    names them. A list: the layers with these names, such as ["q_proj", "v_proj"]. Another string: a regular expression
    that matches whole module names."""


class Model(Section):
    """`[model]`: the model to train."""

    path: Annotated[str, Field(min_length=1)] = RANDOM_MODEL
    """A directory, a name on the model hub, "builtin:tiny" (small, with random weights) or "builtin:smollm2"
    (SmolLM2-135M, downloaded beforehand)."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub; unset: the default branch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of matrix products; trained weights, logits and the loss stay float32. "auto": bfloat16 on a GPU, or on
    a CPU with bfloat16 instructions; else float32."""
    rounding: Literal["auto", "nearest", "stochastic"] = "auto"
    """Rounding of trained weights to bfloat16. "nearest": in every matrix product, which hides updates smaller than a
    weight's last digit. "stochastic": at random once per step, unbiased, and the same in trainer, sampler and saved
    model. "auto": "stochastic" if the base consists of bfloat16 numbers, else "nearest"."""
    lora: Lora | None = None
    """With this table only LoRA adapters are trained; without it all weights are."""
    quantization: Literal["nf4"] | None = None
    """"nf4" stores the frozen linear layers, all but the head, in 4 bits; needs `[model.lora]`."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Render prompts with the tokenizer's chat template. "auto": if it has one."""
    chat_params: Params = {}
    """Variables for the chat template, as in { enable_thinking = false }."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: needs less memory and about a third more time."""


class RolloutSettings(Section):
    """`[rollout]`: sampling of completions for training."""

    engine: Annotated[str, Field(min_length=1)] = "auto"
    """A registered engine, the dotted path of one, or "auto": the fastest engine that can run the model."""
    resample: Literal["none", "uninformative"] = "none"
    """"uninformative": replace groups that `[algorithm] filter` drops with groups of other prompts. The default filter
    drops groups whose advantages are all 0."""
    max_resample: Count = 4
    """Most rounds of resampling per step; after the last one the step trains on the groups it has."""
    overlap: Natural = 0
    """Number of steps that sampling is ahead of training, and so the staleness of rollouts in steps. 0: on-policy. 1:
    sampling and training run at the same time. More only adds staleness."""
    mode: Literal["steps", "continuous"] = "steps"
    """"steps": sample the batches of steps one after the other. "continuous": sample without pause during updates; a
    step trains on the first complete groups. Needs an engine that samples during updates."""
    in_flight: Count | None = None
    """Most groups sampled at the same time with mode = "continuous". Unset: as many as max_staleness allows."""
    max_staleness: Count = 1
    """With mode = "continuous", most steps between the weights that begin a group and the step that is expected to
    train on it. Bounds what is begun; nothing is dropped."""
    mask_truncated: bool = False
    """Exclude completions that were cut off at max_tokens from the loss. Their rewards still count in their group's
    mean."""
    parity_every: Natural = 10
    """Steps between parity checks, which compare the log-probs of sampler and trainer; 0: no checks."""
    parity_tolerance: Positive | None = None
    """Largest mean difference per token, in nats, that a parity check accepts. Unset: 0.001 if sampler and trainer both
    multiply in float32, else 0.15."""

    @cached_property
    def resamples(self) -> bool:
        """Return True if dropped groups are replaced by groups of other prompts."""
        return self.resample != "none"

    @property
    def continuous(self) -> bool:
        """Return True if sampling does not pause during updates."""
        return self.mode == "continuous"

    @property
    def ahead(self) -> int:
        """Return the steps by which sampling may run ahead of training; 0: it pauses during updates."""
        return self.max_staleness if self.continuous else self.overlap


class Algorithm(Section):
    """`[algorithm]`: computation of every token's advantage, and reduction of the loss."""

    advantage_mode: Annotated[str, Field(min_length=1)] = "grpo"
    """Advantage of a completion: a registered name or a dotted path."""
    transform_mode: str | Annotated[tuple[str, ...], Array] = "none"
    """Token transforms: "none", one name, a documented chain such as "gtpo_sepa", or a list of names or dotted paths,
    applied in order."""
    algorithm_mode: str | None = None
    """A preset, the path of a TOML file, or an algorithm. The keys of a preset or file apply where this file does not
    set them. An algorithm (a registered name or a dotted path) replaces the advantage, and the transforms of lower
    layers."""
    uncertainty_kind: Annotated[str, Field(min_length=1)] = "surprisal"
    """Uncertainty of a token, as transforms read it: a registered name or a dotted path."""
    advantage_params: Params = {}
    """Parameters of an advantage_mode given as a dotted path."""
    transform_params: Params = {}
    """Parameters of the dotted paths in transform_mode."""
    params: Params = {}
    """Parameters of an algorithm_mode given as a dotted path."""
    reduction: Annotated[str, Field(min_length=1)] = "token_mean"
    """Reduction of the losses of all tokens to one number: a registered name or a dotted path."""
    filter: Annotated[str, Field(min_length=1)] = "uninformative"
    """Selection of the groups to train on: a registered filter or a dotted path."""


class Loss(Section):
    """One `[[loss]]` entry. The loss is the weighted sum of all terms; a term of weight 0 is not computed."""

    name: Annotated[str, Field(min_length=1)]
    """A registered loss term or the dotted path of one."""
    weight: float | None = None
    """Weight of the term. Unset: `weight` in the term's own table, else the term's default."""
    params: Params = {}
    """Parameters of the term."""


class SourceEntry(Section):
    """One `[[source]]` entry: rows to train on beside the step's rollouts, or in their place."""

    name: Annotated[str, Field(min_length=1)]
    """A registered source such as "replay", or the dotted path of one."""
    params: Params = {}
    """Parameters of the source."""


class Expert(Section):
    """`[expert]`: demonstrations to imitate in addition to rollouts, for loss terms that train on expert rows.

    With several files, `[[expert]]` is one entry of a list; each entry is a source.
    """

    path: Annotated[str, Field(min_length=1)] | None = None
    """A .jsonl or .parquet file. A row has either `messages`, the last of which is the assistant's, or `prompt` and
    `completion`."""
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the batch_size x group_size rows of a step that are expert rows; the step has fewer prompts instead."""
    all_assistant_turns: bool = False
    """Train on every turn of the assistant instead of only the last one; needs a chat template."""
    same_prompts: bool = False
    """Choose expert rows with the prompts of the step's rollouts first, then the others in the order of the file."""


class OptimizerSettings(Section):
    """`[optimizer]`: optimizer and learning rate of RL."""

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    """The optimizer. "adamw8bit" stores each moment in one byte. "muon" updates the weight matrices, AdamW the rest."""
    lr: Positive = 2e-4
    """Peak learning rate. Default 2e-4 for builtin:tiny; for any other model 1e-6, or 1e-4 with LoRA."""
    betas: Annotated[tuple[Decay, Decay], Array] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    eps: Positive = 1e-8
    """Constant added to the square root of the second moment."""
    warmup_steps: Natural = 0
    """Optimizer steps over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule from the end of the warm-up to max_steps."""
    max_grad_norm: Positive = 1.0
    """Gradient clipping: a larger norm is scaled down to this one."""


class Training(Section):
    """`[training]`: size and length of a step and of the run."""

    seed: Seed = 0
    """Seed of every random number in the run."""
    max_steps: Natural = 200
    """Steps of sampling and training; 0: only evaluate and save the warm-started model."""
    batch_size: Count = 16
    """Prompts per step."""
    group_size: Count = 8
    """Completions per prompt."""
    max_tokens: Count = 64
    """Longest completion in tokens, end-of-sequence included."""
    curriculum: Annotated[str, Field(min_length=1)] | None = None
    """A registered curriculum or the dotted path of one. It chooses problems by the rewards of earlier ones."""
    max_prompt_tokens: Count | None = None
    """Longest prompt in tokens; longer ones are skipped in training. Unset: only prompts too long for the model are."""
    temperature: Positive = 1.0
    """Sampling temperature. The trainer computes log-probs at the same temperature."""
    stop_when: StopWhen | None = None
    """Condition that ends the run early, such as { metric = "eval/accuracy", above = 0.95 }."""
    epochs: Count = 1
    """Passes over each step's batch."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    micro_batch_tokens: Count = 16384
    """Tokens per forward and backward pass (at most 2048 on a CPU). Changes memory and speed, not the result."""
    threads: Literal["auto"] | Natural = "auto"
    """CPU threads of the trainer. "auto": OMP_NUM_THREADS if it is set, 1 with a GPU, else a number that depends on the
    cores and the size of the model. 0: as "auto", but regardless of the model's size."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """Device of the trainer: "auto" (a GPU if there is one), "cpu", "cuda", or a GPU by its index, such as "cuda:1"."""
    compile: bool = True
    """On a GPU, compile updates with torch.compile: faster after about a minute at the start. Sharded weights are not
    compiled."""


class Distributed(Section):
    """`[distributed]`: training on several ranks (`retrain train --ranks N`)."""

    shard: Literal["auto", "full", "none"] = "auto"
    """"full": shard the weights over the ranks. "none": each rank holds all weights. "auto": shard if that pays off."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """State to keep in CPU memory instead of GPU memory. "optimizer": its moments, also on a single rank. "all":
    everything that is sharded."""
    timeout_s: Positive = 600.0
    """Seconds that a rank waits for the others during an update; ten times as long while rollouts are sampled and
    scored."""


class Warmup(Section):
    """`[warmup]`: the warm start, supervised training on the task's worked solutions before RL."""

    steps: Natural = 1000
    """Optimizer steps of the warm start; 0: no warm start. Default 1000 for builtin:tiny, 0 for any other model."""
    batch_size: Count = 16
    """Solutions per step."""
    lr: Positive = 1.5e-3
    """Peak learning rate; it decays to 0."""
    warmup_steps: Natural = 50
    """Steps over which the learning rate rises linearly to its peak."""
    problems: Annotated[Problems, Field(ge=1)] = 20000
    """Number of problems whose solutions are imitated, in as many passes as the steps need."""
    seed: Seed = 1
    """Seed of the warm start, separate so that runs with different `[training] seed` start from the same weights."""


class Checkpoint(Section):
    """`[checkpoint]`: saving and resuming."""

    every: Natural = 50
    """Steps between checkpoints; 0: save only at the end."""
    keep: Count = 2
    """Number of newest checkpoints to keep on disk."""
    best: Annotated[str, Field(pattern=r"^eval/.")] | None = None
    """Metric of evaluations, such as "eval/accuracy" or "eval/NAME/pass@4"; the state with its highest value is kept
    as well."""
    resume: Literal["never", "auto"] = "never"
    """Default of `--resume`. "auto": resume from the newest valid checkpoint in the run directory."""


class Logging(Section):
    """`[logging]`: run directory, metrics and stored rollouts."""

    name: Annotated[str, Field(pattern=RUN_NAME)] | None = None
    """Name of the run directory: letters, digits, dots, dashes and underscores. Unset: the name of the TOML file."""
    dir: Annotated[str, Field(min_length=1)] = "runs"
    """Directory in which run directories are created."""
    rollouts_every: Natural = 10
    """Store the rollouts of every so many steps; 0: of no step."""
    observe: Annotated[tuple[str, ...], Array] = ()
    """Columns to compute only for their metrics, such as "sepa_lambda". A campaign adds the signals that any of its
    conditions reads."""
    trackers: Annotated[tuple[str, ...], Array] = ()
    """Trackers that receive metrics in addition to metrics.jsonl: registered names or dotted paths."""
    completions: Natural = 0
    """Completions sent to trackers from each step whose rollouts are stored; 0: none."""
    findings: bool = True
    """Say what is wrong with the run, on the terminal, in status.json and in the report."""


class Plugins(Section):
    """`[plugins]`: code of your own."""

    search_paths: Annotated[tuple[str, ...], Array] = ()
    """Directories in which dotted paths are looked up, after the current directory and its `plugins/`."""


class Config(Section):
    """Configuration of a run. The defaults are tested settings for the builtin model and task."""

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
    expert: Expert | Annotated[tuple[Expert, ...], Array] = Expert()
    source: Annotated[tuple[SourceEntry, ...], Array] = ()
    optimizer: OptimizerSettings = OptimizerSettings()
    training: Training = Training()
    distributed: Distributed = Distributed()
    warmup: Warmup = Warmup()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    plugins: Plugins = Plugins()

    @property
    def experts(self) -> tuple[Expert, ...]:
        """Entries of `[[expert]]`, or the single `[expert]`."""
        return self.expert if isinstance(self.expert, tuple) else (self.expert,)

    @model_validator(mode="before")
    @classmethod
    def _real_model_defaults(cls, data: Any) -> Any:
        """Fill in defaults that depend on LoRA and on whether the model's weights are random."""
        match data:
            # Before validation: afterwards a default looks like a value that was written.
            case {"model": {"path": str(path), **others}} if path != RANDOM_MODEL:
                lora = LORA_DEFAULTS if others.get("lora") is not None else {}
                # A section that is not a table stays as it is, for validation to refuse.
                given = [name for name in REAL_MODEL_DEFAULTS if isinstance(data.get(name, {}), Mapping)]
                defaults = {name: REAL_MODEL_DEFAULTS[name] | lora.get(name, {}) for name in given}
                return {**data, **{name: defaults[name] | dict(data.get(name, {})) for name in given}}
            case _:
                return data

"""Model and tokenizer from a directory, the hub or the built-in; prompts to token ids; saving."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import disable_progress_bars
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from retrain.errors import ComponentError, StorageError
from retrain.functional.seeds import digest_of
from retrain.protocols import Gathering
from retrain.system.files import check_sums, writing
from retrain.system.model_paths import RANDOM_MODEL, model_location, packaged, problem_with
from retrain.training.chat import Chat, TemplateMode, plain_text
from retrain.training.model.builtin_model import build_model, build_tokenizer
from retrain.types import Adapted, Problem

ParameterReader = Callable[[str], Tensor]
"""Gives the full tensor of a parameter by its name; where weights are sharded, every rank must ask for the same."""

_CIRCUMSTANCES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Keys of a configuration that do not change what the model computes."""
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Progress bars would tear the live display and fill logs; a run reports its phases as events.
disable_progress_bar()
disable_progress_bars()


@dataclass(frozen=True)
class Loaded:
    """A model ready to train and sample.

    Attributes:
        model: a transformers causal language model in `eval` mode, so that no dropout disturbs log-probs.
        tokenizer: its tokenizer; always has a pad token.
        stop_ids: every id that ends a completion, from tokenizer, config and generation_config; sorted.
        name: what `[model] path` said.
        mode: whether its prompts are rendered by its chat template.
        source: gives each parameter's values by its name, if the model has none (see `load_model`).
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    name: str
    mode: TemplateMode = "auto"
    source: ParameterReader | None = None

    @property
    def pad_id(self) -> int:
        """The id that fills rows up; masks, never ids, say what is padding.

        A pad token that was added to the tokenizer alone has no embedding: a stop id takes its place.
        """
        tokenizer: Any = self.tokenizer
        pad = int(tokenizer.pad_token_id)
        embedding: Any = self.model.get_input_embeddings()
        return pad if pad < len(embedding.weight) else self.stop_ids[0]

    @property
    def end_id(self) -> int:
        """The id that ends a worked solution: the tokenizer's own end of sequence, else the first stop id."""
        own: Any = self.tokenizer.eos_token_id
        return self.stop_ids[0] if own is None else int(own)

    def digests(self) -> dict[str, str]:
        """sha256 of the tokenizer, its chat template and special tokens included, and of the model's configuration."""
        tokenizer: Any = self.tokenizer
        core = getattr(tokenizer, "backend_tokenizer", None)
        rules: dict[str, Any] = json.loads(core.to_str()) if core is not None else {"vocabulary": tokenizer.get_vocab()}
        # These two are set by every call that pads or cuts.
        words = {key: value for key, value in rules.items() if key not in ("padding", "truncation")}
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        config: dict[str, Any] = json.loads(self.model.config.to_json_string(use_diff=True))
        settings = {key: value for key, value in config.items() if key not in _CIRCUMSTANCES}
        return {
            "tokenizer": digest_of(words, special, tokenizer.chat_template),
            "configuration": digest_of(settings, self.stop_ids),
        }

    @cached_property
    def chat(self) -> Chat:
        """What renders prompts for this model."""
        return Chat(self.tokenizer, self.end_id, self.mode)


def load_model(
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    problems: Iterable[Problem] = (),
    empty: bool = False,
) -> Loaded:
    """Make `builtin:tiny`, or load a packaged model, a directory in transformers format or a model of the hub.

    The model's generation_config names stop ids and decides nothing else.

    Args:
        path: `builtin:tiny`, `builtin:smollm2`, a directory, or a hub id such as `Qwen/Qwen3-0.6B`.
        revision: branch, tag or commit of a hub model.
        dtype: "float32" or "bfloat16": what the weights are held in.
        trust_remote_code: run Python that the model brings along.
        problems: texts that the built-in's tokenizer is trained on: a fixed sample, not this run's order.
        empty: leave the parameters on the meta device, for ranks that each read their shards; the model is loaded as
            usual if its files are not safetensors with its own names.
    Raises:
        ComponentError: no such model, or it is not a causal language model that can be loaded (exit 2).
        StorageError: files are missing or broken, or the hub cannot be reached (exit 6).
    """
    if path == RANDOM_MODEL:
        return _random(problems, dtype)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    place = _checked(path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(place, **options)
        if empty and (found := _empty(place, dtype, options)) is not None:
            return replace(_ready(found[0], tokenizer, path), source=found[1])
        loading: Any = AutoModelForCausalLM.from_pretrained
        model, report = loading(place, dtype=getattr(torch, dtype), output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise _explained(path, error) from error
    except Exception as error:  # safetensors raises a class of its own for a truncated or altered file
        if type(error).__module__.split(".")[0] not in {"safetensors_rust", "safetensors", "builtins", "_pickle"}:
            raise
        why = str(error).partition(". ")[0]  # torch goes on to advise loading a pickle that may run code
        raise StorageError(f"{path}: the weights cannot be read ({why}); copy or download the model again") from error
    if report["missing_keys"]:
        # transformers puts random numbers in their place, and warns.
        raise StorageError(f"{path} has no weights for {', '.join(sorted(report['missing_keys'])[:3])}")
    return _ready(model, tokenizer, path)


def _checked(path: str) -> str:
    """The model's location, after the files there were compared with their hashes, if they have any."""
    if problem := problem_with(path):
        raise ComponentError(*problem)
    location, model = model_location(path), packaged(path)
    check_sums(Path(location), "export the model again" if model is None else f"run `retrain model fetch {model.name}`")
    return location


def _empty(path: str, dtype: str, options: dict[str, Any]) -> tuple[Any, ParameterReader] | None:
    """A model without values, and where they are; None if the files have other names or shapes."""
    config: Any = AutoConfig.from_pretrained(path, **options)
    kind: Any = AutoModelForCausalLM
    with _without_values():
        made = kind.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=options["trust_remote_code"])
    with suppress(OSError):  # not every model has one
        made.generation_config = GenerationConfig.from_pretrained(path, revision=options["revision"])
    local, patterns = Path(path).expanduser(), ["*.safetensors", "*.json"]
    folder = local if local.is_dir() else snapshot_download(path, revision=options["revision"], allow_patterns=patterns)
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            files |= dict.fromkeys(names, file)
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}

    def source(name: str) -> Tensor:
        with safe_open(files[name], "pt") as opened:
            return opened.get_tensor(name)

    fits = all(shapes.get(name) == tuple(p.shape) for name, p in made.named_parameters())
    return (made, source) if fits else None


@contextmanager
def _without_values() -> Generator[None]:
    """Parameters that are made inside this block are on the meta device; buffers have their values."""
    register = nn.Module.register_parameter

    def empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that is on it already is tied to another
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _random(problems: Iterable[Problem], dtype: str) -> Loaded:
    path = RANDOM_MODEL
    said = [(plain_text(one.prompt), *one.replies, one.solution or one.answer) for one in problems]
    texts = [text for texts in said for text in texts]
    if not texts:
        raise ComponentError(f"{path} makes its tokenizer from the task's texts and got none", "name a [task]")
    tokenizer = build_tokenizer(texts)
    return _ready(cast_weights(build_model(tokenizer), getattr(torch, dtype)), tokenizer, path)


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the parameters in place and return the model. Buffers keep their type, as with `from_pretrained`.

    `Module.to(dtype)` would also round the frequencies of the rotary embedding, which are a float32 buffer: in
    bfloat16 each frequency moves by up to .2 %, and the model differs from the one that is saved and loaded again.
    """
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def _explained(path: str, error: Exception) -> ComponentError | StorageError:
    """What went wrong in transformers' loading, in one line, with what to do."""
    text = " ".join(str(error).split())
    first = text[:300]
    if "trust_remote_code" in text:
        return ComponentError(
            f"{path} needs Python code of its own", "read it, then set [model] trust_remote_code = true"
        )
    if any(sign in text for sign in ("offline", "couldn't connect", "Max retries", "Connection", "resolve")):
        return StorageError(
            f"there is no directory {path} here, and the hub cannot be reached ({first}); give the directory of a model"
        )
    if any(sign in text for sign in ("not a valid model identifier", "not a local folder", "gated", "404", "401")):
        return ComponentError(f"no model {path} here or on the hub ({first})", "check the name, revision and access")
    if isinstance(error, (OSError, RuntimeError)):
        return StorageError(f"{path}: the model cannot be read ({first})")
    return ComponentError(f"{path} cannot be loaded as a causal language model ({first})", "is the architecture known?")


def _ready(model: PreTrainedModel, tokenizer: Any, name: str) -> Loaded:
    stop_ids = find_stop_ids(model, tokenizer)
    if not stop_ids:
        raise ComponentError(f"{name} names no end-of-sequence token", "set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        # Padding is masked by length everywhere, so any id will do.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(stop_ids[0])
    settings: Any = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:  # transformers loads contradictory settings and then refuses to save them
        model.generation_config = GenerationConfig(**{name: getattr(settings, name) for name in _SPECIAL_IDS})
    return Loaded(model.eval(), tokenizer, stop_ids, name)


def find_stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every end-of-sequence id that tokenizer, config or generation_config names, sorted."""
    sources: list[Any] = [tokenizer, model.config, getattr(model, "generation_config", None)]
    found: set[int] = set()
    for source in sources:
        ids: Any = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return tuple(sorted(found))


def save_model(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, Tensor],
    dtype: str | None = None,
) -> None:
    """Write a model in transformers format (safetensors), for `from_pretrained` of any tool.

    Args:
        model: gives architecture, config and generation_config.
        weights: the policy's full weights by the base model's names.
        dtype: "float32" or "bfloat16", for all weights: readers hold a model in one precision. None takes float32 if
            any weight has it, as the merged ones of LoRA do, so that none is rounded.
    """
    tensors = distinct(weights)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if not tensors:  # another rank writes them
        return
    kinds = {value.dtype for value in tensors.values() if value.is_floating_point()}
    kind = getattr(torch, dtype) if dtype else torch.float32 if torch.float32 in kinds else kinds.pop()
    tensors = {name: value.to(kind) if value.is_floating_point() else value for name, value in tensors.items()}
    with writing(directory):
        model.save_pretrained(directory, state_dict=tensors)
        if model.dtype != kind:  # readers round the weights to what the configuration says
            config = copy.deepcopy(model.config)
            config.dtype = kind
            config.save_pretrained(directory)
        tokenizer.save_pretrained(str(directory))


def is_here(path: str, revision: str | None) -> bool:
    """Whether a model is in this directory, or in the hub's local cache; asks no network."""
    if (Path(model_location(path)) / "config.json").is_file():
        return True
    with suppress(ValueError):  # a directory that has gone need not look like a name of the hub
        return isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str)
    return False


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Every parameter's name in the base model, by its id."""
    return {id(p): name.replace(".base_layer.", ".") for name, p in model.named_parameters()}


def fill(module: nn.Module, value: Callable[[nn.Parameter], Tensor]) -> None:
    """Give the parameters of a module that are on the meta device their values; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for leaf, p in owner.named_parameters(recurse=False):
            if p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(value(p).to(p.dtype), p.requires_grad)
                setattr(owner, leaf, made[id(p)])


class ReadSingly(Gathering):
    """Weights by name that become whole tensors one at a time, when they are read.

    Args:
        tensors: as they are held. rank: see `Gathering`.
    """

    def __init__(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        self.tensors, self.rank = tensors, rank
        self.shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        first = {id(value): name for name, value in reversed([*tensors.items()])}
        self.untied = [name for name, value in tensors.items() if first[id(value)] == name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def distinct(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, every storage once, under its first name: a tied head is left to tying.

    Those that are read singly come one at a time into the processor's memory of rank 0; the other ranks get nothing.
    """
    base = weights.base if isinstance(weights, Adapted) else weights
    if isinstance(base, Gathering):
        gathered = ((name, weights[name]) for name in base.untied)
        return {name: value.detach().to("cpu").contiguous() for name, value in gathered if base.rank == 0}
    weights = dict(weights)  # merged matrices are computed when read: unless they are kept, two may get one address
    found: dict[int, str] = {}
    for name, value in weights.items():
        found.setdefault(value.data_ptr(), name)
    return {name: weights[name].detach().contiguous() for name in found.values()}

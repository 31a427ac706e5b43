"""Load and save models and tokenizers: built-in ones, directories and the Hugging Face hub."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import disable_progress_bars
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from retrain.errors import ComponentError, StorageError
from retrain.functional.seeds import digest_of
from retrain.system.files import check_sums, expanded, writing
from retrain.system.model_paths import RANDOM_MODEL, model_location, packaged, problem_with
from retrain.training.chat import Chat, TemplateMode, plain_text
from retrain.training.model.builtin_model import build_model, build_tokenizer
from retrain.types import Problem
from retrain.weights import LazyWeights

ParameterReader = Callable[[str], Tensor]
"""Reads the full tensor of a parameter by its name.

If weights are sharded, all ranks must read the same ones in the same order.
"""

_CIRCUMSTANCES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Keys of a config.json that do not change the model's results."""
_KERNELS = (
    None,
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "grouped_mm",
    "batched_mm",
)
"""Attention implementations of transformers itself or of packages that the user installs."""
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a generation_config that are kept if it is invalid."""

# Progress bars would break the live display and fill logs. A run reports its phases as events.
disable_progress_bar()
disable_progress_bars()


@dataclass(frozen=True)
class Loaded:
    """A model ready to train and sample.

    Attributes:
        model: a transformers causal language model in `eval` mode, without dropout.
        tokenizer: its tokenizer, which always has a pad token.
        stop_ids: all ids that end a completion, from tokenizer, config and generation_config; sorted.
        name: the value of `[model] path`.
        mode, chat_params: use of the chat template, and its variables; see `Chat`.
        source: reads the values of parameters if the model is empty (see `load_model`), else None.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    name: str
    mode: TemplateMode = "auto"
    chat_params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: ParameterReader | None = None

    @property
    def pad_id(self) -> int:
        """Token id of padding. Masks define what is padding; no code compares ids.

        A pad token that was added only to the tokenizer has no embedding; a stop id replaces it.
        """
        tokenizer: Any = self.tokenizer
        pad = int(tokenizer.pad_token_id)
        return pad if pad < self.vocabulary else self.stop_ids[0]

    @cached_property
    def vocabulary(self) -> int:
        """Number of token ids of the model, which may have more than its tokenizer."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.num_embeddings)

    @property
    def end_id(self) -> int:
        """Id that ends a worked solution: the tokenizer's end of sequence, or the first stop id."""
        own: Any = self.tokenizer.eos_token_id
        return self.stop_ids[0] if own is None else int(own)

    @property
    def in_bfloat16(self) -> bool:
        """True if the weights are bfloat16 numbers, judged by the first matrix."""
        name, first = next((name, p) for name, p in self.model.named_parameters() if p.ndim > 1)
        values = first if self.source is None else self.source(name)
        return torch.equal(values, values.to(torch.bfloat16).to(values.dtype))

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the tokenizer (with chat template and special tokens) and config."""
        tokenizer: Any = self.tokenizer
        core = getattr(tokenizer, "backend_tokenizer", None)
        rules: dict[str, Any] = json.loads(core.to_str()) if core is not None else {"vocabulary": tokenizer.get_vocab()}
        # Calls that pad or truncate change these two.
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
        """The renderer of prompts for this model."""
        return Chat(self.tokenizer, self.end_id, self.mode, self.chat_params)


def load_model(
    path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    problems: Iterable[Problem] = (),
    empty: bool = False,
) -> Loaded:
    """Load a model and its tokenizer, or build `builtin:tiny`.

    Of the model's generation_config only the stop ids are used.

    Args:
        path: `builtin:tiny`, `builtin:smollm2`, a directory in transformers format, or a hub id such
            as `Qwen/Qwen3-0.6B`.
        revision: branch, tag or commit of a hub model.
        dtype: of the weights: "float32" or "bfloat16".
        trust_remote_code: run Python code that comes with the model.
        problems: problems from whose texts the built-in tokenizer is made. Give a fixed sample that
            does not depend on the run's order.
        empty: leave parameters on the meta device, so that each rank can read its shards. The model
            is loaded normally if its files are not safetensors with the model's parameter names.
    Raises:
        ComponentError: there is no such model, or it is not a causal language model (exit 2).
        StorageError: files are missing or broken, or the hub cannot be reached (exit 6).
    """
    if path == RANDOM_MODEL:
        return _random(problems, dtype)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    place = _checked(path)
    try:
        if not trust_remote_code:
            _refuse_kernels(path, PreTrainedConfig.get_config_dict(place, revision=revision)[0])
        tokenizer: Any = AutoTokenizer.from_pretrained(place, **options)
        if empty and (found := _empty(place, dtype, options)) is not None:
            return replace(_ready(found[0], tokenizer, path), source=found[1])
        loading: Any = AutoModelForCausalLM.from_pretrained
        model, report = loading(place, dtype=getattr(torch, dtype), output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise _explained(path, error) from error
    except Exception as error:  # safetensors has its own class for truncated or altered files
        if type(error).__module__.split(".")[0] not in {"safetensors_rust", "safetensors", "builtins", "_pickle"}:
            raise
        why = str(error).partition(". ")[0]  # torch then suggests an unsafe way to load pickles
        raise StorageError(f"{path}: the weights cannot be read ({why}); copy or download the model again") from error
    _store_tie(model)
    if report["missing_keys"]:
        # transformers only warns, and uses random numbers.
        raise StorageError(f"{path} has no weights for {', '.join(sorted(report['missing_keys'])[:3])}")
    return _ready(model, tokenizer, path)


def _store_tie(model: PreTrainedModel) -> None:
    """Write into the config if embedding and head share their weights.

    A file may hold a head of its own although its config calls it tied. transformers then keeps both, and the next
    program that loads the saved model would drop the trained head.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if embedding is not None and head is not None:
        tied = head.weight is embedding.weight
        for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = tied


def stored_weights(path: str, held: torch.dtype, **options: Any) -> Mapping[str, Tensor] | None:
    """Return a model's stored weights in float32; None if the weights in memory are the same.

    Args:
        held: dtype of the weights in memory.
        options: see `load_model`.
    """
    place = model_location(path)
    config: Any = AutoConfig.from_pretrained(place, **options)
    if held in (torch.float32, config.dtype):
        return None
    return load_model(path, **options).model.state_dict()


def _checked(path: str) -> str:
    """Check a model's files against their hashes, if there are any, and return its location."""
    if problem := problem_with(path):
        raise ComponentError(*problem)
    location, model = model_location(path), packaged(path)
    check_sums(Path(location), "export the model again" if model is None else f"run `retrain model fetch {model.name}`")
    return location


def _refuse_kernels(path: str, config: Mapping[str, Any]) -> None:
    """Raise ComponentError if a config.json names code on the hub, which transformers would run."""
    for key, value in config.items():
        if isinstance(value, Mapping) and not key.endswith("_implementation"):
            _refuse_kernels(path, value)
        for name in value.values() if isinstance(value, Mapping) else [value]:
            if key.strip("_").endswith(("_implementation", "_implementation_internal")) and name not in _KERNELS:
                raise ComponentError(
                    f'{path}: its config.json sets {key} = "{name}", which is code from the hub',
                    "read it, then set [model] trust_remote_code = true; or remove the key",
                )


def _empty(path: str, dtype: str, options: dict[str, Any]) -> tuple[Any, ParameterReader] | None:
    """Build a model on the meta device, and return it with a reader of its values.

    Returns None if the files have other parameter names or shapes.
    """
    config: Any = AutoConfig.from_pretrained(path, **options)
    kind: Any = AutoModelForCausalLM
    with _without_values():
        made = kind.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=options["trust_remote_code"])
    with suppress(OSError):  # a model may have no generation_config
        made.generation_config = GenerationConfig.from_pretrained(path, revision=options["revision"])
    local, patterns = expanded(path), ["*.safetensors", "*.json"]
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

    own = {name: p for name, p in made.named_parameters()}
    # A file may hold a tied parameter under both names, with different values: `load_model` compares them.
    twice = any(name in shapes and name not in own for name, _ in made.named_parameters(remove_duplicate=False))
    fits = not twice and all(shapes.get(name) == tuple(p.shape) for name, p in own.items())
    return (made, source) if fits else None


@contextmanager
def _without_values() -> Generator[None]:
    """Create parameters on the meta device inside this block, but buffers with their values."""
    register = nn.Module.register_parameter

    def empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a meta parameter is tied to an earlier one
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _random(problems: Iterable[Problem], dtype: str) -> Loaded:
    path = RANDOM_MODEL
    rows = [(plain_text(one.prompt), *one.replies, one.solution or one.answer) for one in problems]
    texts = [text for row in rows for text in row]
    if not texts:
        raise ComponentError(f"{path} builds its tokenizer from the task's texts and got none", "add a [task]")
    tokenizer = build_tokenizer(texts)
    return _ready(cast_weights(build_model(tokenizer), getattr(torch, dtype)), tokenizer, path)


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the parameters in place and return the model. Buffers keep their dtype.

    `Module.to(dtype)` would also round the frequencies of the rotary embedding, a float32 buffer. In
    bfloat16 each frequency would move by up to 0.2%, and the model would differ from the one that
    `from_pretrained` loads.
    """
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


def _explained(path: str, error: Exception) -> ComponentError | StorageError:
    """Convert an error of transformers into one line with a fix."""
    text = " ".join(str(error).split())
    first = text[:300]
    if "trust_remote_code" in text:
        return ComponentError(
            f"{path} needs its own Python code", "read that code, then set [model] trust_remote_code = true"
        )
    if any(sign in text for sign in ("offline", "couldn't connect", "Max retries", "Connection", "resolve")):
        return StorageError(
            f"there is no directory {path}, and the hub cannot be reached ({first}); set [model] path to a directory"
        )
    if any(sign in text for sign in ("not a valid model identifier", "not a local folder", "gated", "404", "401")):
        problem = f"there is no directory {path}, and no such model on the hub ({first})"
        return ComponentError(problem, "check the name, revision and access")
    if isinstance(error, (OSError, RuntimeError)):
        return StorageError(f"{path}: the model cannot be read ({first})")
    problem = f"{path} cannot be loaded as a causal language model ({first})"
    return ComponentError(problem, "use an architecture that transformers supports")


def _ready(model: PreTrainedModel, tokenizer: Any, name: str) -> Loaded:
    stop_ids = find_stop_ids(model, tokenizer)
    if not stop_ids:
        raise ComponentError(f"{name} has no end-of-sequence token", "set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        # Any id works, because padding is always masked.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(stop_ids[0])
    settings: Any = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:  # transformers loads contradictory settings, but raises when saving them
        model.generation_config = GenerationConfig(**{name: getattr(settings, name) for name in _SPECIAL_IDS})
    return Loaded(model.eval(), tokenizer, stop_ids, name)


def find_stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all end-of-sequence ids of tokenizer, config and generation_config, sorted."""
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
        directory: where the files are written.
        model: gives architecture, config and generation_config.
        tokenizer: the model's tokenizer.
        weights: full weights by the base model's names.
        dtype: "float32" or "bfloat16" for all weights, because tools hold a model in one dtype. None
            selects float32 if any weight has it, as LoRA's merged weights do, so that no weight is
            rounded.
    Raises:
        StorageError: the directory cannot be written.
    """
    tensors = distinct(weights)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if not tensors:  # rank 0 writes the model
        return
    kinds = {value.dtype for value in tensors.values() if value.is_floating_point()}
    kind = getattr(torch, dtype) if dtype else torch.float32 if torch.float32 in kinds else kinds.pop()
    tensors = {name: value.to(kind) if value.is_floating_point() else value for name, value in tensors.items()}
    with writing(directory):
        model.save_pretrained(directory, state_dict=tensors)
        if model.dtype != kind:  # tools cast the weights to the dtype in the config
            config = copy.deepcopy(model.config)
            config.dtype = kind
            config.save_pretrained(directory)
        tokenizer.save_pretrained(str(directory))


def is_here(path: str, revision: str | None) -> bool:
    """Return True if a model is in this directory or in the hub's local cache, without a request."""
    if (Path(model_location(path)) / "config.json").is_file():
        return True
    with suppress(ValueError):  # a deleted directory may not be a valid hub name
        return isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str)
    return False


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name in the base model of each parameter, by the parameter's `id`."""
    return {id(p): name.replace(".base_layer.", ".") for name, p in model.named_parameters()}


def fill(module: nn.Module, value: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace a module's parameters on the meta device by ones with values; ties are kept.

    Args:
        value: returns the values of a parameter.
    """
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for leaf, p in owner.named_parameters(recurse=False):
            if p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(value(p).to(p.dtype), p.requires_grad)
                setattr(owner, leaf, made[id(p)])


def distinct(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors, with tied weights only once, under their first name.

    Weights that are gathered or dequantized when read are moved to rank 0's CPU memory one by one;
    other ranks get nothing.
    """
    if isinstance(weights, LazyWeights) and weights.lazy:
        read = ((name, weights[name]) for name in weights.untied)
        return {name: value.detach().to("cpu").contiguous() for name, value in read if weights.rank == 0}
    weights = dict(weights)  # keep merged matrices alive: two freed ones could have one address
    found: dict[int, str] = {}
    for name, value in weights.items():
        found.setdefault(value.data_ptr(), name)
    return {name: weights[name].detach().contiguous() for name in found.values()}

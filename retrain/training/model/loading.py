"""A model with its tokenizer, ready to train: loaded or built in, and saved."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import disable_progress_bars
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from retrain.errors import ComponentError
from retrain.functional.seeds import digest_of
from retrain.functional.weights import LazyWeights, ParameterReader
from retrain.system.files import writing
from retrain.system.model_paths import RANDOM_MODEL
from retrain.training.chat import Chat, TemplateMode, plain_text
from retrain.training.model.builtin_model import build_model, build_tokenizer
from retrain.types import Problem, Sampling

_CIRCUMSTANCES = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Keys of a config.json that do not change the model's results."""
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
        eos_ids: ids that end a text, from tokenizer, config and generation_config; sorted.
        name: the value of `[model] path`.
        mode, chat_params: use of the chat template, and its variables; see `Chat`.
        source: reads the values of parameters if the model is empty (see `load_model`), else None.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
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
        return pad if pad < self.vocabulary else self.eos_ids[0]

    @cached_property
    def vocabulary(self) -> int:
        """Number of token ids of the model, which may have more than its tokenizer."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.num_embeddings)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """All ids that end a completion, sorted: those that end a text, and the chat template's end of an answer."""
        return tuple(sorted({*self.eos_ids, self.chat.end_id}))

    def sampling(self, seed: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        """Return settings that end a completion at this model's stop ids; see `Sampling`."""
        return Sampling(temperature, top_p, top_k, self.stop_ids, seed, vocabulary=self.vocabulary)

    @property
    def in_bfloat16(self) -> bool:
        """True if the weights are bfloat16 numbers, judged by the first matrix."""
        name, first = next((name, p) for name, p in self.model.named_parameters() if p.ndim > 1)
        # A model on the meta device has no values of its own.
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
        eos: Any = self.tokenizer.eos_token_id
        return Chat(self.tokenizer, self.eos_ids[0] if eos is None else int(eos), self.mode, self.chat_params)


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
    from retrain.training.model.pretrained import read

    model, tokenizer, source = read(path, revision, dtype, trust_remote_code, empty)
    return replace(_ready(model, tokenizer, path), source=source)


def _random(problems: Iterable[Problem], dtype: str) -> Loaded:
    path = RANDOM_MODEL
    rows = [(plain_text(problem.prompt), *problem.replies, problem.solution or problem.answer) for problem in problems]
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


def with_capped_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Select the attention that caps scores as the configuration says (Gemma 2), and return the model.

    transformers selects SDPA for these models, and its SDPA function ignores the cap.
    """
    config: Any = model.config
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    return model


def _ready(model: PreTrainedModel, tokenizer: Any, name: str) -> Loaded:
    eos_ids = find_eos_ids(model, tokenizer)
    if not eos_ids:
        raise ComponentError(f"{name} has no end-of-sequence token", "set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        # Any id works, because padding is always masked.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(eos_ids[0])
    settings: Any = model.generation_config
    try:
        settings.validate(strict=True)
    except ValueError:  # transformers loads contradictory settings, but raises when saving them
        model.generation_config = GenerationConfig(**{name: getattr(settings, name) for name in _SPECIAL_IDS})
    return Loaded(with_capped_attention(model).eval(), tokenizer, eos_ids, name)


def find_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all end-of-sequence ids of tokenizer, config and generation_config, sorted."""
    sources: list[Any] = [tokenizer, model.config, getattr(model, "generation_config", None)]
    ids_found: set[int] = set()
    for source in sources:
        ids: Any = getattr(source, "eos_token_id", None)
        ids_found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return tuple(sorted(ids_found))


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
    names: dict[int, str] = {}
    for name, value in weights.items():
        # Tied weights share their memory.
        names.setdefault(value.data_ptr(), name)
    return {name: weights[name].detach().contiguous() for name in names.values()}

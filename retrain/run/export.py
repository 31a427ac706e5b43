"""Export the trained model to a directory that other tools can load, and push it to the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from retrain import registry
from retrain.errors import StorageError
from retrain.functional.devices import matmul_dtype
from retrain.functional.weights import LazyWeights
from retrain.report.model_card import CardFacts, render_adapter_card, write_card
from retrain.run.run_context import BASE_DIGESTS, TrainState
from retrain.storage.run_files import read_rows
from retrain.system.files import published
from retrain.system.model_paths import RANDOM_MODEL, model_location
from retrain.system.records import read_json
from retrain.training.model.loading import save_model

if TYPE_CHECKING:
    from torch import Tensor


def export(trained: TrainState, folder: Path, dtype: str | None = None, *, chat: bool = False) -> None:
    """Write model, tokenizer and model card to `folder`, on every rank.

    With LoRA this is the merged model, and `folder/adapter` holds the adapter. `folder/base` holds
    the adapter's base if no other place has it. Trained signals write to `folder/NAME`.

    Args:
        dtype: of the model's weights. "float32" keeps every change of training. "bfloat16" rounds
            once at the end, to the weights that a run in bfloat16 evaluates. None selects
            "bfloat16" with `[model] rounding = "stochastic"`, whose weights are bfloat16 numbers,
            and "float32" otherwise.
        chat: give a tokenizer without a chat template one, because servers of other programs need it for chats.
    Raises:
        StorageError: the folder cannot be written; it is unchanged.
    """
    policy = trained.policy
    # Gathering weights takes all ranks, but only rank 0's files are kept.
    with published(folder) if trained.ranks.rank == 0 else TemporaryDirectory() as written_to:
        stage = Path(written_to)
        dtype = dtype or ("bfloat16" if policy.settings.rounds else "float32")
        save_model(stage, policy.model, trained.loaded.tokenizer, _weights(trained), dtype)
        if chat and getattr(trained.loaded.tokenizer, "chat_template", None) is None:
            (stage / "chat_template.jinja").write_text(_plain_template(trained.loaded.tokenizer), encoding="utf-8")
        if trained.final is None:
            for name, part in trained.pipeline.stateful.items():
                part.export(stage / name)
        else:  # signals are not restored from a final model: copy what they wrote there
            for part in filter(Path.is_dir, trained.final.iterdir()):
                shutil.copytree(part, stage / part.name)
        card = _card(trained, stage, dtype)
        if policy.adapter is not None:
            _save_adapter(trained, stage, card)
        write_card(stage, card)


def _plain_template(tokenizer: Any) -> str:
    """Return a chat template that joins the messages' texts, as `retrain serve` does for a model without a template."""
    ids: list[int] = tokenizer("x")["input_ids"]
    # Servers tokenize a rendered chat without the token that the tokenizer puts in front of a text.
    begins = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    return ("{{ bos_token }}" if begins else "") + "{% for message in messages %}{{ message.content }}{% endfor %}"


def _weights(trained: TrainState) -> Mapping[str, Tensor]:
    """Return the policy's weights, with an adapter merged into its base.

    The base is read again from its files if the run may have rounded it to bfloat16.
    """
    weights, model = trained.policy.weights(), trained.config.model
    made_here = model.path == RANDOM_MODEL or trained.config.warmup.steps
    if not isinstance(weights, LazyWeights) or not weights.updates or made_here or model.quantization:
        return weights
    from retrain.training.model.pretrained import stored_weights

    held = next(value for value in trained.policy.model.parameters() if not value.requires_grad).dtype
    options = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    base = stored_weights(model.path, held, **options) if trained.ranks.rank == 0 else None
    if not trained.ranks.broadcast(base is not None):
        return weights
    # Only rank 0 has read the base, and only its files are kept.
    return {} if base is None else LazyWeights(base, updates=weights.updates)


def _save_adapter(trained: TrainState, folder: Path, card: CardFacts) -> None:
    """Save the adapter, and its base if no other place has it.

    The adapter refers to such a base by a relative path, so the folder can be moved.
    """
    policy, path = trained.policy, trained.config.model.path
    if card.made_here:
        save_model(folder / "base", policy.model, trained.loaded.tokenizer, policy.reference_weights())
        base = "../base"
    else:
        local = Path(model_location(path))
        base = str(local.resolve()) if local.is_dir() else path
    policy.save_adapter(folder / "adapter", base, render_adapter_card(card, base))
    if not card.made_here:
        (folder / "adapter" / BASE_DIGESTS).write_text(json.dumps(trained.digests) + "\n", encoding="utf-8")


def _card(trained: TrainState, folder: Path, dtype: str) -> CardFacts:
    """Collect the facts of the model card: configuration, steps and evaluations.

    Args:
        folder: the exported model.
        dtype: of its weights.
    """
    run = trained.run
    return CardFacts(
        name=run.resolve().name,
        config=read_json(run / "config.resolved.json"),
        evaluations=read_rows(run / "eval.jsonl"),
        steps=trained.steps,
        adapter=trained.policy.adapter is not None or (folder / "adapter").is_dir(),
        evaluated_in=_precision(trained),
        rounded=dtype == "bfloat16" and trained.policy.adapter is None,
        chat=trained.loaded.chat.templated,
    )


def _precision(trained: TrainState) -> str:
    """Return the dtype in which the run's engine computes, such as "bfloat16"."""
    dtype = trained.engine.params.get("dtype", "auto")
    if dtype == "auto" and registry.engine.traits_of(trained.engine).exact:
        # The embedded engine chooses by device and model; other engines use the trainer's dtype.
        device = trained.policy.device
        kind = matmul_dtype(device) if device.type == "cpu" else next(trained.policy.model.parameters()).dtype
        return str(kind).removeprefix("torch.")
    return str(trained.policy.settings.dtype if dtype == "auto" else dtype)


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload an exported model to the Hugging Face hub, and return its address.

    huggingface_hub finds the access token in HF_TOKEN or in an earlier login.

    Args:
        repository: USER/NAME; it is created if it does not exist.
    Raises:
        StorageError: the hub cannot be reached, or refuses the upload.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))
    except Exception as error:
        raise StorageError(
            f"{repository}: the upload failed ({error}); check the name, HF_TOKEN and the network"
        ) from error

"""The trained model as a directory that other tools load, and on the hub."""

from __future__ import annotations

from pathlib import Path

from retrain.errors import StorageError
from retrain.run.parts import Parts
from retrain.run.rundir import read_rows
from retrain.training.card import Card, write_card
from retrain.training.models import save_model


def export(parts: Parts, folder: Path) -> None:
    """Write model, tokenizer and card; with LoRA the merged model, and the adapter in `folder/adapter`."""
    save_model(folder, parts.policy.model, parts.loaded.tokenizer, parts.policy.weights())
    if parts.policy.adapter is not None:
        parts.policy.save_adapter(folder / "adapter")
    write_card(folder, card_of(parts))


def card_of(parts: Parts) -> Card:
    """What the run's own files say of the model: how it started, was trained and did."""
    run = parts.directory.path
    config = parts.directory.stored_config()
    return Card(
        name=run.resolve().name,
        base=config["model"]["path"],
        task=config["task"]["name"],
        config=(run / "config.toml").read_text(),
        evaluations=read_rows(run / "eval.jsonl"),
        steps=parts.policy.step or config["training"]["max_steps"],
        warmup_steps=config["warmup"]["steps"],
        adapter=parts.policy.adapter is not None,
    )


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload an exported model; returns its address.

    The access token is that of huggingface_hub: environment variable HF_TOKEN, or an earlier login.

    Raises:
        StorageError: the hub cannot be reached or refuses.
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

"""The trained model as a directory that other tools load, and on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path

from retrain.errors import StorageError
from retrain.run.parts import Parts
from retrain.run.rundir import read_rows
from retrain.training.card import Card, write_card
from retrain.training.models import save_model
from retrain.types import BUILTIN


def export(parts: Parts, folder: Path) -> None:
    """Write model, tokenizer and card; with LoRA the merged model, and the adapter in `folder/adapter`.

    What the adapter applies to is in `folder/base` if the run made it itself, by its warm start. A stateful signal
    with a method `export(folder)` writes what it has learned to `folder/NAME`.
    """
    save_model(folder, parts.policy.model, parts.loaded.tokenizer, parts.policy.weights())
    final = parts.directory.path / "model"
    if Path(parts.config.model.path) == final:
        _copy_folders(final, folder)
    else:
        if parts.policy.adapter is not None:
            _save_adapter(parts, folder)
        for name, part in parts.pipeline.stateful.items():
            if hasattr(part, "export"):
                part.export(folder / name)
    write_card(folder, card_of(parts, folder))


def _save_adapter(parts: Parts, folder: Path) -> None:
    policy = parts.policy
    if parts.config.warmup.steps or parts.config.model.path.startswith(BUILTIN):
        save_model(folder / "base", policy.model, parts.loaded.tokenizer, policy.weights(adapters=False))
        policy.save_adapter(folder / "adapter", base=str(folder / "base"))
    else:
        policy.save_adapter(folder / "adapter")


def _copy_folders(model: Path, folder: Path) -> None:
    """What stands beside a final model: opened again, it is merged, and its signals are new."""
    for part in model.iterdir():
        if part.is_dir() and model.resolve() != folder.resolve():
            shutil.copytree(part, folder / part.name, dirs_exist_ok=True)


def card_of(parts: Parts, folder: Path) -> Card:
    """What the run's own files say of the model in `folder`: how it started, was trained and did."""
    run = parts.directory.path
    config = parts.directory.stored_config()
    return Card(
        name=run.resolve().name,
        base=config["model"]["path"],
        task=config["task"]["name"],
        config=(run / "config.toml").read_text(),
        evaluations=read_rows(run / "eval.jsonl"),
        steps=parts.steps,
        warmup_steps=config["warmup"]["steps"],
        adapter=(folder / "adapter").is_dir(),
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

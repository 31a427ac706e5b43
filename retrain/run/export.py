"""The trained model as a directory that other tools load, and on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path

from retrain.errors import StorageError
from retrain.report.model_card import Card, write_card
from retrain.run.run_parts import Trained
from retrain.storage.run_directory import read_rows
from retrain.training.model.loading import save_model
from retrain.types import BUILTIN


def export(trained: Trained, folder: Path) -> None:
    """Write model, tokenizer and card; with LoRA the merged model, and the adapter in `folder/adapter`.

    What the adapter applies to is in `folder/base` if the run made it itself, by its warm start. A stateful signal
    with a method `export(folder)` writes what it has learned to `folder/NAME`.
    """
    save_model(folder, trained.policy.model, trained.loaded.tokenizer, trained.policy.weights())
    final = trained.directory.path / "model"
    if Path(trained.config.model.path) == final:
        _copy_folders(final, folder)
    else:
        if trained.policy.adapter is not None:
            _save_adapter(trained, folder)
        for name, part in trained.pipeline.stateful.items():
            if hasattr(part, "export"):
                part.export(folder / name)
    write_card(folder, card_of(trained, folder))


def _save_adapter(trained: Trained, folder: Path) -> None:
    policy = trained.policy
    if trained.config.warmup.steps or trained.config.model.path.startswith(BUILTIN):
        save_model(folder / "base", policy.model, trained.loaded.tokenizer, policy.weights(adapters=False))
        policy.save_adapter(folder / "adapter", base=str(folder / "base"))
    else:
        policy.save_adapter(folder / "adapter")


def _copy_folders(model: Path, folder: Path) -> None:
    """What stands beside a final model: opened again, it is merged, and its signals are new."""
    for part in model.iterdir():
        if part.is_dir() and model.resolve() != folder.resolve():
            shutil.copytree(part, folder / part.name, dirs_exist_ok=True)


def card_of(trained: Trained, folder: Path) -> Card:
    """What the run's own files say of the model in `folder`: how it started, was trained and did."""
    run = trained.directory.path
    config = trained.directory.stored_config()
    return Card(
        name=run.resolve().name,
        base=config["model"]["path"],
        task=config["task"]["name"],
        config=(run / "config.toml").read_text(),
        evaluations=read_rows(run / "eval.jsonl"),
        steps=trained.steps,
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

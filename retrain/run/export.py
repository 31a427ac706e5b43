"""The trained model as a directory that other tools load, and on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from retrain.errors import StorageError
from retrain.report.model_card import CardFacts, render_adapter_card, write_card
from retrain.run.run_parts import Trained
from retrain.storage.run_files import read_rows
from retrain.system.files import published
from retrain.system.model_paths import model_location
from retrain.system.records import read_json
from retrain.training.model.loading import save_model


def export(trained: Trained, folder: Path, dtype: str = "float32") -> None:
    """Write model, tokenizer and card; with LoRA the merged model, and the adapter in `folder/adapter`.

    What the adapter applies to is in `folder/base` if the run made it itself. A part of credit that has
    learned something writes it to `folder/NAME`.

    Args:
        dtype: of the model's weights. "float32" keeps all that training changed; "bfloat16" rounds once, at the end.
    Raises:
        StorageError: the folder cannot be written; it is as it was.
    """
    policy = trained.policy
    # All ranks gather the weights, and the files of the others are thrown away.
    with published(folder) if trained.ranks.rank == 0 else TemporaryDirectory() as place:
        stage = Path(place)
        save_model(stage, policy.model, trained.loaded.tokenizer, policy.weights(), dtype)
        if trained.final is None:
            for name, part in trained.pipeline.stateful.items():
                part.export(stage / name)
        else:  # of a final model that was opened again the signals are new ones in this process: theirs are copied
            for part in filter(Path.is_dir, trained.final.iterdir()):
                shutil.copytree(part, stage / part.name)
        card = _card(trained, stage)
        if policy.adapter is not None:
            _save_adapter(trained, stage, card)
        write_card(stage, card)


def _save_adapter(trained: Trained, folder: Path, card: CardFacts) -> None:
    """The adapter, and its base where nothing else has it: paths between the two hold wherever they are moved to."""
    policy, path = trained.policy, trained.config.model.path
    if card.made_here:
        save_model(folder / "base", policy.model, trained.loaded.tokenizer, policy.reference_weights())
        base = "../base"
    else:
        local = Path(model_location(path))
        base = str(local.resolve()) if local.is_dir() else path
    policy.save_adapter(folder / "adapter", base, render_adapter_card(card, base))


def _card(trained: Trained, folder: Path) -> CardFacts:
    """What the run's own files say of the model in `folder`: how it started, was trained and did."""
    run = trained.directory.path
    return CardFacts(
        name=run.resolve().name,
        config=read_json(run / "config.resolved.json"),
        evaluations=read_rows(run / "eval.jsonl"),
        steps=trained.steps,
        adapter=trained.policy.adapter is not None or (folder / "adapter").is_dir(),
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

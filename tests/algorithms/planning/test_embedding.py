import importlib

import pytest

from retrain.algorithms.planning.embedding import cosines, embedder
from retrain.errors import ComponentError, MissingExtraError

pytestmark = pytest.mark.numeric

WITHOUT_GRAMS = "`make test` does not install sentence-transformers: pip install -e '.[grams]'"


def test_tf_idf_rows_have_length_one_and_similar_phrases_are_near():
    embed = embedder(None, ["let me check", "let me think", "the sum of digits"])
    [[same, near, far, unknown]] = cosines(
        embed(["let me check"]), embed(["let me check", "let me check it", "the sums", "123"])
    ).tolist()
    assert same == pytest.approx(1)
    assert 1 > near > 0.5 > far
    assert unknown == 0


def test_a_missing_package_names_the_extra(monkeypatch, tmp_path):
    def refuse(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    for directory in (None, str(tmp_path)):
        with pytest.raises(MissingExtraError, match=r"\[grams\]"):
            embedder(directory, ["a"])


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ComponentError, match="no directory"):
        embedder(str(tmp_path / "none"), [])
    pytest.importorskip("sentence_transformers", reason=WITHOUT_GRAMS)
    with pytest.raises(ComponentError, match="is not a sentence-transformer"):
        embedder(str(tmp_path), [])


def test_a_sentence_transformer_from_a_directory(tmp_path):
    package = pytest.importorskip("sentence_transformers", reason=WITHOUT_GRAMS)
    models = pytest.importorskip("sentence_transformers.models", reason=WITHOUT_GRAMS)
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "let", "me", "think", "check", "so", "we", "add"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "base")
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "base")
    parts = models.Transformer(str(tmp_path / "base")), models.Pooling(16)
    package.SentenceTransformer(modules=list(parts), device="cpu").save(str(tmp_path / "model"))
    embed = embedder(str(tmp_path / "model"), [])
    [[same, other]] = cosines(embed(["let me think"]), embed(["let me think", "so we add"])).tolist()
    assert same == pytest.approx(1, abs=1e-5)
    assert other < same

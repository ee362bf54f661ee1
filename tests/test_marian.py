"""Marian models: what transformers makes of the stored one is made here too, and the way back gives the same files.

tests/fixtures/marian was made, and is compared with MarianMTModel itself, by scripts/check_marian.py.
"""

import json
import pickle
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
from safetensors.numpy import load_file, save_file
from sentencepiece import sentencepiece_model_pb2

from keras_transformer import training
from keras_transformer.config import DecodingSettings, Settings, load_settings, run_settings, settings_yaml
from keras_transformer.data.tokenizer import Tokenizer, Tokenizers, train_sentencepiece
from keras_transformer.errors import DataError, UsageError
from keras_transformer.export.ctranslate2 import export_ctranslate2
from keras_transformer.export.saved_model import export_saved_model
from keras_transformer.ids import END, PAD, START, UNK
from keras_transformer.marian import channel_order, export_marian, import_marian
from keras_transformer.positions import positional_encoding
from keras_transformer.runs import load_run, make_model, save_run
from keras_transformer.translator import Translator

FIXTURE = Path(__file__).parent / "fixtures" / "marian"
EXPECTED = json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "vocab.json", "source.spm", "target.spm")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian") / "run"
    import_marian(FIXTURE, folder)
    return folder


@pytest.fixture
def copy(tmp_path):
    """A folder as the fixture, to be damaged."""
    folder = tmp_path / "marian"
    folder.mkdir()
    for name in (*FILES, "model.safetensors"):
        shutil.copyfile(FIXTURE / name, folder / name)
    return folder


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")


def refused(folder, message):
    """It is refused in one line that begins so, and nothing is written."""
    with pytest.raises(DataError) as error:
        import_marian(folder, folder.parent / "run")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert list(folder.parent.iterdir()) == [folder]


def test_translates_as_transformers_does(run):
    """200 texts by a beam of 4, with and without a code of the language, with characters that it has no piece for."""
    assert len(EXPECTED) == 200 and len(set(EXPECTED.values())) > 100
    assert Translator.load(run).translate(list(EXPECTED)) == list(EXPECTED.values())


def test_gives_the_same_logits(run):
    model, tokenizers = load_run(run)
    theirs = np.load(FIXTURE / "logits.npz")
    vocabulary = json.loads((FIXTURE / "vocab.json").read_text(encoding="utf-8"))
    rows = {vocabulary[piece]: row for row, piece in enumerate(tokenizers.target.pieces) if piece in vocabulary}
    inp, tar = (np.vectorize(rows.get)(theirs[name]).astype("int32") for name in ("inp", "tar"))
    tar[:, 0] = START
    columns = [rows[number] for number in range(len(vocabulary))]
    logits = model((inp, tar)).numpy()
    padding = columns.index(PAD)  # has no share of the probability: "renormalize_logits" of generation_config.json
    assert padding == len(columns) - 1
    np.testing.assert_allclose(logits[..., columns[:padding]], theirs["logits"][..., :padding], atol=1e-4)
    assert (logits[..., [PAD, START]].max(-1) < logits.max(-1) - 50).all()


def test_the_channels_are_those_of_the_same_frequency():
    """Theirs: the sines of all frequencies, then the cosines; of 6 channels, ours are 0, 3, 1, 4, 2, 5 of them."""
    assert channel_order(6).tolist() == [0, 3, 1, 4, 2, 5]
    ours = positional_encoding(20, 6)[0]
    angles = np.arange(20)[:, None] / 10000 ** (np.arange(0, 6, 2) / 6)
    theirs = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    np.testing.assert_allclose(theirs[:, channel_order(6)], ours, atol=1e-6)


def test_text_becomes_their_ids_and_the_code_is_one(run):
    """Those of sentencepiece's own pieces in vocab.json; a code that it lacks is unknown."""
    source = load_run(run)[1].source
    assert [source.pieces[i] for i in (PAD, UNK, START, END)] == ["<pad>", "<unk>", "<start>", "</s>"]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(FIXTURE / "source.spm"))
    rows = {piece: row for row, piece in enumerate(source.pieces)}
    for code, text in [(">>fra<<", " \u00bd  Two dogs"), ("", "猫 cats"), (">>xxx<<", "a<<b"), ("", "a >>fra<< b")]:
        expected = [*([code] if code else []), *processor.encode(text, out_type=str), "</s>"]
        [ids] = source.encode(tf.constant([code + text])).to_list()
        assert ids == [rows.get(piece, UNK) for piece in expected]
    invalid, replaced = source.encode(tf.constant([b"a \xff dog", "a \ufffd dog"])).to_list()
    assert invalid == replaced


def test_a_start_with_a_row_of_its_own(copy, run, tmp_path):
    """Instead of padding's: the decoder begins with that row."""
    change(copy / "config.json", decoder_start_token_id=7)
    import_marian(copy, tmp_path / "run")
    rows = load_file(copy / "model.safetensors")["model.shared.weight"]
    embeddings = load_run(tmp_path / "run")[0].encoder.embedding.embeddings.numpy()
    assert len(embeddings) == len(rows)
    for row, number in ((START, 7), (PAD, len(rows) - 1), (END, 0)):
        np.testing.assert_array_equal(embeddings[row], rows[number][channel_order(32)])


def test_the_settings_are_theirs(run):
    settings = run_settings(run)
    model, decoding = settings.model, settings.decoding
    assert (model.num_layers, model.d_model, model.num_heads, model.dff) == (2, 32, 4, 64)
    assert (model.activation, model.norm, model.norm_epsilon, model.output_bias) == ("silu", "post", 1e-5, True)
    assert (settings.data.source_language, settings.data.target_language) == ("eng", "deu+fra")
    assert (decoding.beam_size, decoding.length_norm, decoding.length_penalty) == (4, "average", 1.0)
    assert (decoding.max_length, decoding.max_length_extra) == (63, 63)  # theirs counts the start


def test_languages_can_be_given(tmp_path, copy):
    (copy / "tokenizer_config.json").unlink()
    import_marian(copy, tmp_path / "run", "en", "de")
    import_marian(copy, tmp_path / "unknown")
    assert run_settings(tmp_path / "run").data.target_language == "de"
    assert run_settings(tmp_path / "unknown").data.target_language == "und"


def test_other_words_are_barred_too(tmp_path, copy):
    """bad_words_ids, of which padding is one that never comes anyway; before there was a generation_config.json."""
    (copy / "generation_config.json").unlink()
    pad = json.loads((copy / "config.json").read_text())["pad_token_id"]
    change(copy / "config.json", bad_words_ids=[[pad], [5]], num_beams=2, max_length=9)
    import_marian(copy, tmp_path / "run")
    decoding = run_settings(tmp_path / "run").decoding
    vocabulary = json.loads((copy / "vocab.json").read_text(encoding="utf-8"))
    assert [vocabulary[piece] for piece in decoding.forbidden] == [5]
    assert (decoding.beam_size, decoding.max_length) == (2, 8)


def test_the_way_back_gives_the_same_files(run, tmp_path):
    """But for the bias of padding, which is never emitted: here it is the reason why."""
    export_marian(run, tmp_path / "out")
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (FIXTURE, tmp_path / "out"))
    assert (ours["final_logits_bias"][0, -1], theirs["final_logits_bias"][0, -1]) == (-100, 0)
    ours["final_logits_bias"][0, -1] = 0
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    assert ours.keys() <= theirs.keys()
    for name in ("vocab.json", "config.json", "generation_config.json"):
        before, after = (
            json.loads((folder / name).read_text(encoding="utf-8")) for folder in (FIXTURE, tmp_path / "out")
        )
        for key in before.keys() & after.keys():
            assert before[key] == after[key], (name, key)
        assert after.keys() - before.keys() <= {"length_penalty", "min_length", "no_repeat_ngram_size"}
    for name in ("source.spm", "target.spm"):
        assert (FIXTURE / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert "MarianMTModel.from_pretrained" in (tmp_path / "out" / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_the_search_goes_there_and_back(run, tmp_path):
    """A text of at least 9 tokens, the end counted, without the piece ".": theirs counts the start, and not the end."""
    search = DecodingSettings(beam_size=3, min_length=9, max_length=20, length_penalty=0.5, forbidden=(".", "</s>"))
    export_marian(run, tmp_path / "out", search)
    told = json.loads((tmp_path / "out/generation_config.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((tmp_path / "out/vocab.json").read_text(encoding="utf-8"))
    assert (told["min_length"], told["max_length"]) == (9, 21)
    assert sorted(told["bad_words_ids"]) == sorted([[vocabulary["."]], [0], [vocabulary["<pad>"]]])
    import_marian(tmp_path / "out", tmp_path / "again")
    again = run_settings(tmp_path / "again").decoding
    assert set(again.forbidden) == set(search.forbidden)
    same = ("beam_size", "min_length", "max_length", "length_penalty")
    assert [getattr(again, name) for name in same] == [getattr(search, name) for name in same]


def test_two_vocabularies_there_and_back(tmp_path):
    """A model without shared embeddings goes there and comes back with the same logits."""
    settings = Settings(
        model={"num_layers": 1, "d_model": 8, "num_heads": 2, "dff": 16, "share_embeddings": False},
        data={"joint_vocabulary": False, "train": ("a", "b"), "dev": ("a", "b"), "target_language": "fr"},
    )
    english, french = ["a dog runs", "two dogs"], ["un chien court vite", "deux chiens", "xyz"]
    tokenizers = Tokenizers(*(Tokenizer(train_sentencepiece(lines, 30)) for lines in (english, french)))
    model = make_model(settings.model, tokenizers)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(scale=0.3, size=weight.shape))
    save_run(tmp_path / "run", settings, tokenizers, model)
    export_marian(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "target_vocab.json").exists()
    import_marian(tmp_path / "out", tmp_path / "again")
    again, others = load_run(tmp_path / "again")
    assert [piece for piece in others.target.pieces[4:]] == tokenizers.target.pieces[4:]
    inp, tar = np.array([[5, 6, 7, 3, 0]], "int32"), np.array([[2, 5, 6]], "int32")
    norm_epsilon = 1e-5  # theirs; ours was 1e-6, which is the difference
    np.testing.assert_allclose(
        again((inp, tar)).numpy()[..., 3:], model((inp, tar)).numpy()[..., 3:], atol=100 * norm_epsilon
    )


def test_goes_on_training_and_exports(run, tmp_path):
    """Tuned on other pairs its loss falls, and SavedModel, CTranslate2 and the run translate alike."""
    lines = list(EXPECTED)[:120]
    for name, texts in {"a": lines, "b": [EXPECTED[line].upper() for line in lines]}.items():
        (tmp_path / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
    changes = {
        "data.train": [str(tmp_path / "a"), str(tmp_path / "b")],
        "data.dev": [str(tmp_path / "a"), str(tmp_path / "b")],
        "training.init_from": str(run),
        "training.max_steps": 200,
        "training.evaluate_every": 100,
        "training.log_every": 10,
        "training.tokens_per_batch": 512,
        "training.learning_rate": 0.002,
        "training.warmup_steps": 10,
        "training.average": 0,
    }
    settings = load_settings(run / "settings.yaml", [f"{name}={json.dumps(value)}" for name, value in changes.items()])
    tuned = tmp_path / "tuned"
    training.train(settings, tuned)
    losses = [json.loads(line).get("loss") for line in (tuned / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < 0.6 * losses[0]
    search = DecodingSettings(beam_size=4, length_penalty=0.0)
    export_saved_model(tuned, tmp_path / "saved", search)
    export_ctranslate2(tuned, tmp_path / "ct2", search)
    expected = Translator.load(tuned, search).translate(lines)
    assert expected != list(EXPECTED.values())[:120]
    assert Translator.load(tmp_path / "saved").translate(lines) == expected
    same = map(str.__eq__, Translator.load(tmp_path / "ct2").translate(lines), expected)
    assert sum(same) >= 118


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"normalize_before": True}, "normalize_before True is not supported, False is"),
        ({"normalize_embedding": True}, "normalize_embedding True is not supported"),
        ({"model_type": "bart"}, "model_type 'bart' is not supported, 'marian' is"),
        ({"activation_function": "gelu_new"}, "activation_function 'gelu_new' is not supported, swish, "),
        ({"decoder_layers": 6}, "encoder_layers 2 with decoder_layers 6 is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False with share_encoder_decoder_embeddings"),
        ({"d_model": "32"}, "d_model must be a whole number, got '32'"),
        ({"eos_token_id": [0, 1]}, "eos_token_id must be a whole number"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(copy, values, message):
    change(copy / "config.json", **values)
    refused(copy, f"{copy / 'config.json'}: {message}")


@pytest.mark.parametrize("name", ["config.json", "vocab.json", "source.spm", "target.spm"])
def test_a_missing_or_damaged_file_is_named(copy, name):
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: len(content) // 2])
    refused(copy, f"{copy / name}: damaged")
    (copy / name).unlink()
    refused(copy, f"{copy}: no Marian model" if name == "config.json" else f"{copy / name}: No such file")


def test_a_tokenizer_cut_between_two_pieces_is_damaged(copy):
    """SentencePiece reads it as a model of fewer pieces that normalises nothing."""
    path = copy / "source.spm"
    whole = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    path.write_bytes(sentencepiece_model_pb2.ModelProto(pieces=whole.pieces[:31]).SerializeToString())
    assert sentencepiece.SentencePieceProcessor(model_file=str(path)).vocab_size() == 31
    refused(copy, f"{path}: damaged, or no SentencePiece model (cut short)")


def test_a_vocabulary_of_another_size_is_refused(copy):
    """D13, https://github.com/tensorflow/tensorflow/issues/27033: an id without a row is found at once."""
    path = copy / "vocab.json"
    vocabulary = json.loads(path.read_text(encoding="utf-8"))
    change(path, more=len(vocabulary))
    refused(copy, f"{path} has {len(vocabulary) + 1} pieces, vocab_size of config.json is {len(vocabulary)}")
    change(copy / "config.json", vocab_size=len(vocabulary) + 1)
    refused(copy, f"{copy}: model.shared.weight has the sizes ({len(vocabulary)}, 32), by config.json they are")
    for number in (7, str(len(vocabulary))):
        path.write_text(json.dumps({**vocabulary, "more": number}), encoding="utf-8")
        refused(copy, f"{path}: the ids must be 0 to {len(vocabulary)}, each once")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_length", "64", "max_length must be a whole number, got '64'"),
        ("min_length", [3], "min_length must be a whole number, got [3]"),
        ("bad_words_ids", [5], "bad_words_ids must be lists of one id each, got [5]"),
        ("bad_words_ids", [[5, 6]], "bad_words_ids must be lists of one id each, got [[5, 6]]"),
    ],
)
def test_a_search_that_is_none_is_refused(copy, name, value, message):
    change(copy / "generation_config.json", **{name: value})
    refused(copy, f"{copy}: {message}")


def test_damaged_or_foreign_weights_are_refused(copy):
    path = copy / "model.safetensors"
    weights, content = load_file(path), path.read_bytes()
    path.write_bytes(content[:-1000])
    refused(copy, f"{path}: damaged")
    save_file({**weights, "model.encoder.layernorm_embedding.weight": np.ones(32, np.float32)}, path)
    refused(copy, f"{copy}: a Transformer as it is here has no place for model.encoder.layernorm_embedding.weight")
    name = "model.decoder.layers.1.fc2.bias"
    save_file({key: value for key, value in weights.items() if key != name}, path)
    refused(copy, f"{copy}: the weights have no {name}")
    save_file({**weights, "lm_head.weight": weights["model.shared.weight"] + 1}, path)
    refused(copy, f"{copy}: model.shared.weight and lm_head.weight are not the same")
    path.unlink()
    refused(copy, f"{copy}: neither model.safetensors nor pytorch_model.bin")


class Burglar:
    """What a pickle can run when it is read."""

    def __reduce__(self):
        return Path.touch, (Path("burgled"),)


def test_no_code_in_a_pickle_is_run(copy, monkeypatch):
    """With PyTorch it is refused as more than weights, without as something that takes PyTorch to read.

    PyTorch's part is played: its unpickler for weights alone refuses the rest, the other one runs it.
    """
    monkeypatch.chdir(copy)
    (copy / "model.safetensors").unlink()
    path = copy / "pytorch_model.bin"
    path.write_bytes(pickle.dumps({"model.shared.weight": Burglar()}))

    def load(path, map_location, weights_only):
        if not weights_only:
            return pickle.loads(path.read_bytes())
        raise pickle.UnpicklingError("Weights only load failed")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(load=load))
    refused(copy, f"{path}: damaged, or more than weights (Weights only load failed)")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(copy, f"{path} takes PyTorch to read: pip install torch, or get model.safetensors")
    assert not (copy / "burgled").exists()


def test_weights_in_a_pickle_are_read_by_pytorch(copy, run, tmp_path):
    torch = pytest.importorskip("torch")
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save({name: torch.from_numpy(value) for name, value in weights.items()}, copy / "pytorch_model.bin")
    import_marian(copy, tmp_path / "run")
    for one, other in zip(load_run(tmp_path / "run")[0].weights, load_run(run)[0].weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("model", "decoding", "message"),
    [
        ({"norm": "pre"}, {}, "a Marian model normalises after each sublayer"),
        ({}, {"length_norm": "gnmt"}, "length_norm"),
        ({}, {"method": "sample"}, "decoding.method sample"),
        ({}, {"precision": "int8"}, "decoding.precision int8: a Marian model is float32"),
    ],
)
def test_what_transformers_has_not_is_refused(tmp_path, model, decoding, message):
    (tmp_path / "settings.yaml").write_text(settings_yaml(Settings(model=model)), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        export_marian(tmp_path, tmp_path / "out", DecodingSettings(**decoding))
    assert not (tmp_path / "out").exists()

"""The CTranslate2 folder, behind `Translator`: the same texts and numbers as TensorFlow, or a clear line."""

import random
import shutil

import numpy as np
import pytest
from test_translator import LINES

from keras_transformer.config import DecodingSettings, Settings
from keras_transformer.data.tokenizer import Tokenizer, Tokenizers, train_sentencepiece
from keras_transformer.errors import DataError, UsageError
from keras_transformer.export.ctranslate2 import export_ctranslate2
from keras_transformer.ids import PAD, START
from keras_transformer.runs import make_model, save_run
from keras_transformer.translator import Translator

MODELS = {
    "post, apart": {"share_embeddings": False},
    "pre, shared": {"norm": "pre", "activation": "gelu"},
    "what Marian has": {"activation": "silu", "output_bias": True, "norm_epsilon": 1e-2, "scale_embeddings": False},
}
EXACT = {"length_penalty": 0.0, "patience": None}
TEXTS = [*LINES, "", " \t", "dogs " * 100, "a\u00a0cat", *(f"{line} and {line}" for line in LINES)]


def make_run(folder, model_settings, bias=()):
    """A run of an untrained model that never emits padding or start, which CTranslate2 takes no account of."""
    tokenizer = Tokenizer(train_sentencepiece(LINES, 40))
    random.seed(3)
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "dff": 32, "pe_input": 20, "pe_target": 20}
    settings = Settings(model={**sizes, "output_bias": True, **model_settings})
    model = make_model(settings.model, Tokenizers(tokenizer, tokenizer))
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(weight + rng.normal(scale=0.1, size=weight.shape))
    biases = model.projection()[1]
    value = biases.numpy()
    value[[PAD, START]] = -100.0
    for number, logit in bias:
        value[number] += logit
    biases.assign(value)
    save_run(folder, settings, Tokenizers(tokenizer, tokenizer), model)
    return folder


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def run(request, tmp_path_factory):
    """Its end is made so probable that most outputs end."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", request.param, bias=[(3, 3.0)])


def both(run, out, **options):
    """The translations in TensorFlow and in CTranslate2."""
    decoding = DecodingSettings(**options)
    export_ctranslate2(run, out, decoding)
    return [list(Translator.load(folder, decoding).stream(TEXTS)) for folder in (run, out)]


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 1},
        {"beam_size": 3, "n_best": 2, **EXACT},
        {"beam_size": 3, "n_best": 3, "length_penalty": 1.0, "patience": 1.0},
        {"beam_size": 2, "min_length": 4, "max_length": 7, **EXACT},
        # Greedily: which token is best does not depend on the share that an end which is too early has or has not.
        {"beam_size": 1, "min_length_factor": 0.5, "max_length_factor": 1.0, "max_length_extra": 2},
        {"beam_size": 2, "max_length_factor": 1.0, "max_length_extra": 2, **EXACT},
    ],
    ids=["greedy", "n best", "length penalty", "limits", "limits by the source", "most by the source"],
)
def test_gives_tensorflows_translations(run, tmp_path, options):
    ours, theirs = both(run, tmp_path / "out", **options)
    compared = 0
    for text, mine, other in zip(TEXTS, ours, theirs, strict=True):
        if options.get("length_penalty") and any(found.ids[-1:] not in ([], [3]) for found in other):
            continue  # a hypothesis that came to the limit may have pushed out one that ended
        # By a beam, what came to the limit without an end is ranked otherwise there; greedily, there is no rank.
        finished = [found for found in mine if options["beam_size"] == 1 or found.ids[-1:] in ([], [3])]
        compared += any(found.ids for found in finished)
        assert [found.ids for found in other][: len(finished)] == [found.ids for found in finished], text
        assert [found.text for found in other][: len(finished)] == [found.text for found in finished]
        if "min_length" in options or "min_length_factor" in options:
            continue  # an end that is too early has no share of the probability there
        for one, two in zip(finished, other, strict=False):
            np.testing.assert_allclose([one.log_prob, one.score], [two.log_prob, two.score], atol=1e-3)
    assert compared > 10  # of the 14 that are not blank


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder / "run", MODELS["pre, shared"])
    export_ctranslate2(run, folder / "out", DecodingSettings(beam_size=2, precision="int8"))
    export_ctranslate2(run, folder / "exact", DecodingSettings(beam_size=2))
    return run, folder / "out", folder / "exact"


def test_what_is_barred_never_comes(plain):
    options = DecodingSettings(beam_size=3, no_repeat_ngram=2, forbidden=("▁c",))
    translator = Translator.load(plain[2], options)
    for [found] in translator.stream(TEXTS):
        pairs = list(zip(found.ids, found.ids[1:], strict=False))
        assert len(set(pairs)) == len(pairs)
        assert not {PAD, START, translator.pieces.index("▁c")} & set(found.ids)


def test_scores_given_translations_as_tensorflow_does(plain):
    pairs = list(zip(LINES, reversed(LINES), strict=True))
    ours, theirs = (list(Translator.load(folder, DecodingSettings()).score(pairs)) for folder in (plain[0], plain[2]))
    for mine, other in zip(ours, theirs, strict=True):
        assert [piece for piece, _ in mine] == [piece for piece, _ in other]
        np.testing.assert_allclose([log_prob for _, log_prob in mine], [log_prob for _, log_prob in other], atol=1e-4)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_translation_begins_as_asked(plain, beam_size):
    """And what it begins with counts: log_prob is what `score` says of all its pieces."""
    decoding = DecodingSettings(beam_size=beam_size, patience=1.0)
    ours, theirs = (
        list(Translator.load(folder, decoding).stream(LINES[:3], ["a", "", "dogs"])) for folder in (plain[0], plain[2])
    )
    assert [found.text for [found] in theirs] == [found.text for [found] in ours]
    assert theirs[0][0].text.startswith("a") and theirs[2][0].text.startswith("dogs")
    for [one], [other] in zip(ours, theirs, strict=True):
        np.testing.assert_allclose([one.log_prob, one.score], [other.log_prob, other.score], atol=1e-3)


def test_the_fewest_tokens_are_no_more_than_the_most(plain):
    """min_length 60 of a position table of 20, and of a source's own limit of 3 more than its length."""
    for folder in plain[::2]:
        translator = Translator.load(folder, DecodingSettings(beam_size=2, min_length=60, max_length_extra=3))
        for text, [found] in zip(LINES, translator.stream(LINES), strict=True):
            assert len(found.ids) == min(20, len(translator.module.encode([text])[0][0]) + 3)


def test_the_folder_says_its_own_precision_and_search(plain):
    """int8 has other numbers than float32, near them."""
    translator = Translator.load(plain[1])
    assert translator.decoding == DecodingSettings(beam_size=2, precision="int8")
    int8, exact = (list(Translator.load(folder).score([(LINES[0], LINES[1])]))[0] for folder in plain[1:])
    differences = [abs(one - other) for (_, one), (_, other) in zip(int8, exact, strict=True)]
    assert 0 < max(differences) < 0.2
    with pytest.raises(UsageError, match="^.*out: its weights are int8; `export --precision float32` makes others"):
        Translator.load(plain[1], DecodingSettings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "sample"}, "decoding.method sample: "),
        ({"length_norm": "gnmt"}, "decoding.length_norm gnmt: "),
        ({"patience": None}, "decoding.patience null: "),
        ({"patience": 0.5}, "decoding.patience 0.5: "),
        ({"forbidden": ("zebra",)}, "decoding.forbidden: the target vocabulary has no piece 'zebra'"),
        ({"precision": "bfloat16"}, "decoding.precision bfloat16: "),
    ],
)
def test_a_search_that_ctranslate2_does_not_do_is_refused(plain, tmp_path, options, message):
    for refused in (
        lambda: export_ctranslate2(plain[0], tmp_path / "out", DecodingSettings(**options)),
        lambda: Translator.load(plain[2], DecodingSettings(**options)),
    ):
        with pytest.raises(UsageError, match=f"^{message}"):
            refused()
    assert list(tmp_path.iterdir()) == []


def test_int8_is_refused_of_a_run(plain):
    with pytest.raises(UsageError, match="decoding.precision int8: .*--format ctranslate2"):
        Translator.load(plain[0], DecodingSettings(precision="int8"))


def test_attention_is_not_to_be_had(plain):
    translator = Translator.load(plain[2])
    [[found]] = translator.stream(LINES[:1])
    with pytest.raises(UsageError, match="does not give its attention"):
        translator.attention(LINES[0], found)


def test_a_damaged_folder_is_named(plain, tmp_path):
    broken = shutil.copytree(plain[2], tmp_path / "broken")
    (broken / "model.bin").write_bytes((broken / "model.bin").read_bytes()[:1000])
    with pytest.raises(DataError, match=f"^{broken}: damaged CTranslate2 model"):
        Translator.load(broken)

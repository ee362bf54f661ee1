"""Settings: their YAML reads back, changes apply, and what is wrong is said in one line."""

import pytest
import yaml

from keras_transformer.config import PRESETS, Settings, load_settings, preset, settings_yaml
from keras_transformer.errors import UsageError


@pytest.fixture
def load(tmp_path):
    def load(text, *changes):
        path = tmp_path / "my.yaml"
        path.write_text(text, encoding="utf-8")
        return load_settings(path, changes)

    return load


@pytest.mark.parametrize("name", PRESETS)
def test_yaml_of_a_preset_loads_back_equal(load, name):
    assert load(settings_yaml(preset(name))) == preset(name)


def test_presets_are_the_papers():
    """Section 6.2, table 3: N, d_model, h, d_ff and dropout."""

    def sizes(name):
        model = preset(name).model
        return model.num_layers, model.d_model, model.num_heads, model.dff, model.rate

    assert sizes("base") == (6, 512, 8, 2048, 0.1)
    assert sizes("big") == (6, 1024, 16, 4096, 0.3)
    assert sizes("tiny") == (4, 128, 4, 256, 0.1)
    assert preset("tiny") == Settings()


VALUES = [
    "no",
    "null",
    "1e3",
    "a: b # c",
    "[x]",
    "ação.tsv",
    " lead",
    "it's",
    'a"b',
    "数据/c.gz",
    "x" * 200,
    "%",
    "-",
    "~",
]


@pytest.mark.parametrize("value", VALUES)
def test_yaml_of_any_text_loads_back_equal(load, value):
    """Norwegian's code is false to YAML, and names of files may be anything."""
    data = preset("tiny").data.model_copy(update={"train": value, "dev": value})
    settings = load_settings(None).model_copy(update={"data": data})
    text = settings_yaml(settings)
    assert load(text) == settings
    assert settings_yaml(load(text)) == text


def test_yaml_says_what_each_setting_means():
    text = settings_yaml(preset("tiny"))
    assert max(map(len, text.splitlines())) <= 120
    settings = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(settings) == sum(len(section) for section in preset("tiny").model_dump().values())
    assert all("  # " in line for line in settings)
    assert "  num_layers: 4                           # layers of the encoder, and of the decoder" in settings


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_file_is_the_defaults(load, text):
    assert load(text) == Settings()


def test_no_file_is_the_phrasebook():
    """Changes to it are for one run: they leave it as it is for the next."""
    before = load_settings(None)
    assert before.data.train == before.data.dev == "phrasebook:en-de"
    changed = load_settings(None, ["model.dff=8", "data.vocab_size=99"])
    assert changed.model == before.model.model_copy(update={"dff": 8})
    assert changed.data == before.data.model_copy(update={"vocab_size": 99})
    assert load_settings(None) == before


def test_file_then_changes(load):
    settings = load(
        "model: {dff: 64}\ndata: {train: [a.en, a.de.gz]}\n",
        "model.dff=96",
        "training.max_steps=7",
        "training.clip_norm=null",
        "training.label_smoothing=5e-2",
        "data.dev=[b=c.en, d.de]",
        "data.columns=[3, 1]",
        "training.max_steps=8",
    )
    assert settings.model.dff == 96
    assert settings.training.max_steps == 8
    assert settings.training.clip_norm is None
    assert settings.training.label_smoothing == 0.05
    assert settings.data.train == ("a.en", "a.de.gz")
    assert settings.data.dev == ("b=c.en", "d.de")
    assert settings.data.columns == (3, 1)


@pytest.mark.parametrize(
    "changes",
    [("model.d_model=30", "model.num_heads=3"), ("data.joint_vocabulary=false", "model.share_embeddings=false")],
)
def test_settings_that_must_agree_change_in_either_order(changes):
    """30 is no multiple of the default 4 heads, nor is 128 of 3: neither change is right without the other."""
    assert load_settings(None, changes) == load_settings(None, changes[::-1])
    with pytest.raises(UsageError, match=f"^--set {changes[0]}: model"):
        load_settings(None, changes[:1])


def test_a_change_is_not_blamed_for_the_files_disagreement(tmp_path):
    (tmp_path / "my.yaml").write_text("model: {d_model: 30}")
    with pytest.raises(UsageError, match=r"^\S*my.yaml: model.d_model must be a multiple"):
        load_settings(tmp_path / "my.yaml", ["training.max_steps=5"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {d_mdel: 8}", "no setting is called 'model.d_mdel'; did you mean 'd_model'?"),
        ("modle: {}", "no setting is called 'modle'; did you mean 'model'?"),
        ("training: {steps: 8}", "no setting is called 'training.steps'; did you mean 'max_steps'?"),
        ("data: {qqq: 8}", "no setting is called 'data.qqq'; there are train, dev, source_language, "),
        ("training: {max_steps: 0}", "training.max_steps: Input should be greater than or equal to 1, got 0"),
        ("training: {max_steps: many}", "training.max_steps: Input should be a valid integer, "),
        ("training: {clip_norm: .nan}", "training.clip_norm: Input should be "),
        ("training: {clip_norm: .inf}", "training.clip_norm: Input should be a finite number, got inf"),
        ("training: {clip_norm: 0}", "training.clip_norm: Input should be greater than 0, got 0"),
        ("training: {label_smoothing: 1}", "training.label_smoothing: Input should be less than 1, got 1"),
        ("model: {rate: -0.1}", "model.rate: Input should be greater than or equal to 0, got -0.1"),
        ("model: {norm: middle}", "model.norm: Input should be 'post' or 'pre', got 'middle'"),
        ("model: {d_model: 30}", "model.d_model must be a multiple of model.num_heads, got 30 and 4"),
        ("data: {joint_vocabulary: false}", "model.share_embeddings needs data.joint_vocabulary"),
        ("data: {train: [a]}", "data.train: "),
        ("data: {source_language: no}", "data.source_language: Input should be a valid string, got False"),
        ("data: {columns: [0, 1]}", "data.columns.0: Input should be greater than or equal to 1, got 0"),
        ("hello", "wanted settings as NAME: VALUE, got 'hello'"),
        ("model: [4]", "model: wanted settings as NAME: VALUE, got [4]"),
        ("1: 2", "1: Keys should be strings"),
        ("model: [\n\nx: :", "while parsing "),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(load, tmp_path, text, message):
    with pytest.raises(UsageError) as error:
        load(text)
    assert str(error.value).startswith(f"{tmp_path / 'my.yaml'}: {message}")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "training.max_steps",
            "--set takes SECTION.NAME=VALUE, such as training.max_steps=100, got 'training.max_steps'",
        ),
        ("max_steps=3", "--set takes SECTION.NAME=VALUE, such as training.max_steps=100, got 'max_steps=3'"),
        ("a.b.c=3", "--set takes SECTION.NAME=VALUE, such as training.max_steps=100, got 'a.b.c=3'"),
        (
            "training.max_step=3",
            "--set training.max_step=3: no setting is called 'training.max_step'; did you mean 'max_steps'?",
        ),
        ("train.seed=3", "--set train.seed=3: no setting is called 'train'; did you mean 'training'?"),
        ("model.dff=", "--set model.dff=: model.dff: Input should be a valid integer, got None"),
        ("model.dff=[", "--set model.dff=[: '[' is not a YAML value"),
    ],
)
def test_what_is_wrong_in_a_change_is_one_line(change, message):
    with pytest.raises(UsageError) as error:
        load_settings(None, [change])
    assert str(error.value) == message


def test_unreadable_files(tmp_path):
    with pytest.raises(UsageError, match=r"none\.yaml: .*No such file"):
        load_settings(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("data: {train: ação}".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.yaml: .*'utf-8' codec"):
        load_settings(tmp_path / "latin.yaml")


def test_unknown_preset():
    with pytest.raises(UsageError, match="^no preset is called 'bas'; did you mean 'base'\\?$"):
        preset("bas")
    with pytest.raises(UsageError, match="^no preset is called 'medium'; there are tiny, base, big$"):
        preset("medium")


def test_settings_do_not_change():
    """They are what settings.yaml says the run was begun with."""
    with pytest.raises(ValueError, match="frozen"):
        preset("tiny").model.dff = 3
    assert yaml.safe_load(settings_yaml(preset("tiny")))["model"]["dff"] == 256


def test_a_phrasebook_into_another_language_is_refused():
    """Its BLEU would be measured with the wrong tokenizer; a locale such as zh_Hans is Chinese."""
    with pytest.raises(UsageError, match="phrasebook:en-ja is not into data.target_language=de"):
        load_settings(None, ["data.train=phrasebook:en-ja"])
    book = "phrasebook:en-zh_Hans"
    load_settings(None, [f"data.train={book}", f"data.dev={book}", "data.target_language=zh"])


def test_a_tfds_set_has_two_sides():
    """With target_language alone set to the default source's, it would be trained to copy."""
    changes = ["data.train=tfds:ted_hrlr_translate/pt_to_en", "data.dev=tfds:ted_hrlr_translate/pt_to_en"]
    with pytest.raises(UsageError, match="data.source_language and data.target_language, .*, are both en$"):
        load_settings(None, [*changes, "data.target_language=en"])
    load_settings(None, [*changes, "data.target_language=en", "data.source_language=pt"])


def test_a_section_with_every_line_commented_out_is_the_defaults(load):
    assert load("model:\n  # d_model: 64\n") == Settings()


def test_dev_must_be_given_with_train():
    """The phrasebook's dev part would choose the best model by text that has nothing to do with it."""
    with pytest.raises(UsageError, match="^--set data.train=my.tsv: data.dev must be given") as error:
        load_settings(None, ["data.train=my.tsv"])
    assert "\n" not in str(error.value)
    load_settings(None, ["data.train=my.tsv", "data.dev=dev.tsv"])


def test_only_the_wrong_one_of_several_changes_is_named():
    with pytest.raises(UsageError, match=r"^--set data.columns=\[0,1\]: data.columns.0: "):
        load_settings(None, ["model.dff=64", "data.columns=[0,1]", "training.seed=3"])

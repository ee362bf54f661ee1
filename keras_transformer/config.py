"""The settings of a run: what they are, what they may be, and how they are read, changed and written as YAML."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import yaml
from pydantic import Field

from keras_transformer.errors import DataError, UsageError

Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]  # strict: YAML's `true` is no 1
Natural = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(Strict):
    """The Transformer."""

    num_layers: Count = Field(4, description="layers of the encoder, and of the decoder")
    d_model: Count = Field(128, description="size of the vectors; a multiple of num_heads")
    num_heads: Count = Field(4, description="attention heads")
    dff: Count = Field(256, description="size inside the feed-forward networks")
    rate: Share = Field(0.1, description="dropout on each sublayer's output and on the embeddings")
    attention_rate: Share = Field(0.0, description="dropout on the attention weights")
    ffn_rate: Share = Field(0.0, description="dropout inside the feed-forward networks")
    norm: Literal["post", "pre"] = Field("post", description="normalise after the residual sum (the paper), or before")
    activation: Literal["relu", "gelu", "silu"] = Field("relu", description="relu (the paper), gelu or silu")
    share_embeddings: bool = Field(
        True, description="one matrix for source, target and projection; needs joint_vocabulary"
    )
    norm_epsilon: float = Field(1e-6, gt=0, description="added to the variance when normalising")
    scale_embeddings: bool = Field(True, description="times sqrt(d_model) (the paper)")
    output_bias: bool = Field(False, description="with share_embeddings, a bias on the logits (without, there is one)")
    pe_input: Count = Field(256, description="longest source in tokens, the end token counted")
    pe_target: Count = Field(256, description="longest target in tokens, the end token counted")


class DataSettings(Strict):
    """The text: phrasebook:en-de (built in), [SOURCE_FILE, TARGET_FILE], FILE.tsv (files may be .gz), or tfds:NAME."""

    train: str | tuple[str, str] = Field("phrasebook:en-de", description="what to train on")
    dev: str | tuple[str, str] = Field("phrasebook:en-de", description="what to measure on while training")
    source_language: str = Field("en", description="as a code: en, pt, zh, ...; of a tfds: set, the side to read")
    target_language: str = Field("de", description="the same; it also picks the tokenizer that BLEU is measured with")
    columns: tuple[Count, Count] = Field((1, 2), description="of a TSV: the source's and the target's, counted from 1")
    data_dir: str | None = Field(None, description="where TFDS keeps its data sets; null for its own default")
    bleu_tokenizer: Literal["13a", "intl", "zh", "char", "ja-mecab", "ko-mecab", "none"] | None = Field(
        None, description="sacreBLEU's; null for the target language's; none for text that is tokenised"
    )
    vocab_size: Count = Field(8000, description="most subword pieces (of each side, if not joint)")
    joint_vocabulary: bool = Field(True, description="one vocabulary for both sides, or one each")
    max_length: Count | None = Field(None, description="longest side in tokens to train on; null: the position tables'")
    max_ratio: float | None = Field(
        None, ge=1, description="most tokens of a side to train on, in times the other's; null: any"
    )
    drop_duplicates: bool = Field(False, description="of pairs that are the same, train on the first alone")
    subword_dropout: Share = Field(
        0.0, description="share of subword merges left out at random in training (BPE-dropout: 0.1)"
    )


class TrainingSettings(Strict):
    """The updates."""

    max_steps: Count = Field(8000, description="updates in all")
    tokens_per_batch: Count = Field(4096, description="positions of a batch, on the longer side")
    accumulate: Count = Field(1, description="batches of an update, on each device")
    warmup_steps: Count = Field(4000, description="updates over which the learning rate rises (equation 3)")
    learning_rate: float | None = Field(
        None, gt=0, description="the highest; null for the paper's, (d_model * warmup_steps)^-0.5"
    )
    label_smoothing: Share = Field(0.1, description="share of the probability spread over the vocabulary")
    clip_norm: float | None = Field(1.0, gt=0, description="longest gradient, over all weights; null for any")
    precision: Literal["auto", "float32", "onednn_bfloat16", "mixed_bfloat16", "mixed_float16"] = Field(
        "auto", description="what is computed in; auto: the machine's fastest"
    )
    deterministic: bool = Field(
        False, description="the same run again gives the same weights, bit for bit; slower on GPUs"
    )
    max_skipped: Count = Field(20, description="stop after so many updates in a row without a finite loss and gradient")
    init_from: str | None = Field(None, description="a run folder whose best model to begin with")
    init_vocabulary: Literal["keep", "new"] = Field(
        "keep", description="with init_from: its vocabulary, or a new one, rows carried over by piece"
    )
    frozen: tuple[str, ...] = Field((), description="parts that stay as they are: encoder, decoder/dec_layer1, ...")
    seed: int = Field(1, ge=0, description="of the weights, the dropout and the order of the text")
    log_every: Count = Field(100, description="updates between two lines of metrics.jsonl and the curves")
    evaluate_every: Count = Field(500, description="updates between two measures on dev")
    checkpoint_every: Count = Field(250, description="updates between two checkpoints")
    keep_checkpoints: Count = Field(10, description="how many checkpoints to keep")
    select: Literal["bleu", "loss"] = Field("bleu", description="what makes a model the best on dev")
    patience: Count | None = Field(None, description="stop after this many measures without a better one; null: never")
    average: Natural = Field(10, description="newest checkpoints whose mean is tried as the best model; 0 for none")


class DecodingSettings(Strict):
    """The search for a translation; the beam's size and the longest output are the paper's (section 6.1)."""

    method: Literal["beam", "sample"] = Field("beam", description="beam search (greedy with beam_size 1), or sampling")
    beam_size: Count = Field(4, le=1000, description="hypotheses that are followed")
    n_best: Count = Field(1, description="translations of each source; at most beam_size")
    length_norm: Literal["average", "gnmt"] = Field(
        "average", description="divide by n^a, or by ((5 + n) / 6)^a (the paper, with a = 0.6)"
    )
    length_penalty: float = Field(1.0, ge=0, description="a; 0 ranks by the log-probability itself")
    patience: float | None = Field(
        2.0, gt=0, description="stop when this many times beam_size have ended; null: when no other can win"
    )
    max_length: Count | None = Field(None, description="most tokens, the end counted; null: the position table's")
    max_length_factor: float = Field(1.0, ge=0, description="most tokens, besides: this times the source's, and then")
    max_length_extra: Natural = Field(50, description="this many more")
    min_length: Natural = Field(0, description="fewest tokens, the end token counted")
    min_length_factor: float = Field(0.0, ge=0, description="fewest tokens: at least this times the source's")
    no_repeat_ngram: Natural = Field(0, le=100, description="length of the n-grams that no output has twice; 0 for any")
    forbidden: tuple[str, ...] = Field((), description="pieces that are never emitted")
    temperature: float = Field(1.0, gt=0, description="of sampling: below 1, probable tokens become more so")
    top_k: Count | None = Field(None, description="of sampling: from this many most probable tokens; null for all")
    top_p: float = Field(1.0, gt=0, le=1, description="of sampling: from those with this probability together")
    seed: Natural = Field(1, description="of sampling")
    precision: Literal["float32", "bfloat16", "int8"] = Field(
        "float32", description="of the weights and what is computed; int8 is CTranslate2's alone"
    )

    @pydantic.model_validator(mode="after")
    def agree(self):
        if self.n_best > self.beam_size:
            raise ValueError(f"n_best must be at most beam_size, got {self.n_best} and {self.beam_size}")
        if self.max_length is not None and self.min_length > self.max_length:
            raise ValueError(f"min_length must be at most max_length, got {self.min_length} and {self.max_length}")
        if self.method == "sample" and self.n_best > 1:
            raise ValueError(f"sampling gives one translation of each source, got n_best {self.n_best}")
        return self

    @property
    def hypotheses(self) -> int:
        """How many are decoded for each source at a time."""
        return self.beam_size if self.method == "beam" else 1


class Settings(Strict):
    """All settings of a run."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    training: TrainingSettings = TrainingSettings()
    decoding: DecodingSettings = DecodingSettings()

    @pydantic.model_validator(mode="after")
    def agree(self):
        if self.model.d_model % self.model.num_heads:
            raise ValueError(
                f"model.d_model must be a multiple of model.num_heads, got {self.model.d_model} and "
                f"{self.model.num_heads}"
            )
        language = self.data.target_language  # "zh" for the locale "zh_Hans"
        for name, source in (("train", self.data.train), ("dev", self.data.dev)):
            if str(source).startswith("phrasebook:") and not re.search(f"-{re.escape(language)}(_.*)?$", str(source)):
                raise ValueError(f"data.{name}={source} is not into data.target_language={language}: set that too")
            if str(source).startswith("tfds:") and language == self.data.source_language:
                raise ValueError(
                    f"data.{name}={source}: data.source_language and data.target_language, which name its two sides, "
                    f"are both {language}"
                )
        if "phrasebook:" in str(self.data.dev) and "phrasebook:" not in str(self.data.train):
            raise ValueError("data.dev must be given with data.train: the phrasebook says nothing about other text")
        if self.model.share_embeddings and not self.data.joint_vocabulary:
            raise ValueError("model.share_embeddings needs data.joint_vocabulary")
        if self.training.average > self.training.keep_checkpoints:
            raise ValueError(
                f"training.average must be at most training.keep_checkpoints, got {self.training.average} and "
                f"{self.training.keep_checkpoints}"
            )
        if self.training.init_vocabulary == "new" and not self.training.init_from:
            raise ValueError("training.init_vocabulary needs training.init_from")
        if self.training.deterministic and self.data.subword_dropout:
            raise ValueError("training.deterministic cannot be had with data.subword_dropout, which has no seed")
        return self


# Section 6.2, table 3: base and big. tiny is Wu et al. 2021's, for corpora of some ten thousand sentences.
PRESETS = {
    "tiny": {},
    "base": {"num_layers": 6, "d_model": 512, "num_heads": 8, "dff": 2048},
    "big": {"num_layers": 6, "d_model": 1024, "num_heads": 16, "dff": 4096, "rate": 0.3},
}


# What `train` and `demo` take when no settings are given: small, for phrases of some ten words.
PHRASEBOOK = {
    "model": {"num_layers": 2, "num_heads": 8, "rate": 0.0, "norm": "pre", "pe_input": 64, "pe_target": 64},
    "data": {"vocab_size": 1500},
    "training": {
        "max_steps": 2500,
        "tokens_per_batch": 1024,
        "warmup_steps": 1000,
        "label_smoothing": 0.0,
        "evaluate_every": 500,
    },
    "decoding": {"beam_size": 1},
}


def preset(name: str) -> Settings:
    """The default settings with the model of that size."""
    if name not in PRESETS:
        raise UsageError(f"no preset is called {name!r}{nearest(name, PRESETS)}")
    return Settings(model=PRESETS[name])


def nearest(name: str, names) -> str:
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else f"; there are {', '.join(names)}"


def settings_from(values: object, origin: str, changes: Sequence[str] = ()) -> Settings:
    """Validated settings from nested dictionaries.

    `origin` is where they came from, and `changes` those of them that came by --set, for the message.

    Raises:
        UsageError: the first of what is wrong, in one line.
    """
    try:
        return Settings.model_validate({} if values is None else values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"]]
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "model_type":
            message = "wanted settings as NAME: VALUE"
        # Settings that do not agree have no place of their own, but the message names them.
        blamed = (lambda name: name.startswith(".".join(where[:2]))) if where else (lambda name: name in message)
        named = [f"--set {change}" for change in changes if blamed(change.partition("=")[0])]
        origin = " ".join(named) or origin
        if first["type"] == "extra_forbidden":
            fields = Settings.model_fields
            if len(where) > 1:
                fields = fields[where[0]].annotation.model_fields
            name = ".".join(where)
            raise UsageError(f"{origin}: no setting is called {name!r}{nearest(where[-1], fields)}") from None
        where = [part for part in where if part not in ("str", "tuple[str, str]")]
        got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
        raise UsageError(f"{origin}: {'.'.join(where) + ': ' if where else ''}{message}{got}") from None


def load_settings(path: str | Path | None, changes: Sequence[str] = ()) -> Settings:
    """The settings of a YAML file (the phrasebook's if None) after changes of the form "training.max_steps=100".

    Raises:
        UsageError: the file is missing or no YAML, a setting is unknown or its value is wrong.
    """
    origin, values = "settings", PHRASEBOOK
    if path is not None:
        origin = str(path)
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            if isinstance(values, dict):  # a section with every line commented out is None
                values = {section: {} if content is None else content for section, content in values.items()}
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(section, dict) for section in values.values()):
        return settings_from(values, origin)  # which says what is wrong; nothing could be changed in it
    for change in changes:
        key, equals, value = change.partition("=")
        parts = key.split(".")
        if not equals or len(parts) != 2:
            raise UsageError(f"--set takes SECTION.NAME=VALUE, such as training.max_steps=100, got {change!r}")
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--set {change}: {value!r} is not a YAML value") from None
        values = {**values, parts[0]: {**values.get(parts[0], {}), parts[1]: value}}
    # All changes at once: two settings that must agree can be changed in either order.
    return settings_from(values, origin, changes)


def run_settings(folder: Path, changes: Sequence[str] = ()) -> Settings:
    """The settings of a run folder, or of the run that a SavedModel was exported from; `changes` as in load_settings.

    Raises:
        DataError: the folder is neither, or the settings are not whole.
    """
    path = folder / "settings.yaml"
    if (folder / "saved_model.pb").exists():
        path = folder / "assets.extra" / "settings.yaml"
        if not path.exists():
            raise DataError(f"{folder}: a SavedModel, but none that `keras-transformer export` wrote")
    elif not path.exists() and (folder / "source.spm").exists():
        raise DataError(f"{folder}: a Marian model; `keras-transformer import-marian` makes a run of it")
    elif not path.exists():
        raise DataError(f"{folder}: no run folder (it has no settings.yaml)")
    # Of what is missing, the defaults would be taken, and other text would come out.
    there = load_settings(path).model_fields_set
    missing = [section for section in Settings.model_fields if section not in there]
    if missing:
        raise DataError(f"{path}: damaged (it has no {missing[0]})")
    return load_settings(path, changes)


def settings_yaml(settings: Settings) -> str:
    """All settings as YAML, each with what it means."""
    lines = []
    for section, field in Settings.model_fields.items():
        values = getattr(settings, section).model_dump(mode="json")
        lines += [f"# {field.annotation.__doc__}", f"{section}:"]
        for name, setting in field.annotation.model_fields.items():
            text = f"  {name}: {yaml_value(values[name])}"
            lines.append(f"{text:<40}  # {setting.description}")
        lines.append("")
    return "\n".join(lines)


def yaml_value(value: object) -> str:
    """A setting's value as YAML, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()

"""Marian models as Hugging Face keeps them, OPUS-MT's among them: such a folder becomes a run, and a run such a folder.

Their ids are 0 the end, 1 unknown, then the pieces, and last padding, which the decoder begins with as well. Ours begin
with padding, unknown, start and end. Their position table has all sines before all cosines, ours has them in turn: each
axis of d_model channels changes its order, which nothing inside the layers notices.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from keras_transformer.checkpoints import without_numbers
from keras_transformer.config import DecodingSettings, ModelSettings, Settings, run_settings, settings_from
from keras_transformer.data.tokenizer import MarianTokenizer, Tokenizers
from keras_transformer.errors import DataError, UsageError, first_line
from keras_transformer.export.card import CARD, make_card
from keras_transformer.files import whole
from keras_transformer.ids import END, PAD, START, UNK
from keras_transformer.model import Transformer
from keras_transformer.runs import load_run, make_model, save_run
from keras_transformer.translator_module import forbidden_ids

USAGE = """
```python
from transformers import MarianMTModel, MarianTokenizer

tokenizer, model = MarianTokenizer.from_pretrained("FOLDER"), MarianMTModel.from_pretrained("FOLDER")
tokenizer.batch_decode(model.generate(**tokenizer(["..."], return_tensors="pt")), skip_special_tokens=True)
```
"""
ACTIVATIONS = {"swish": "silu", "silu": "silu", "relu": "relu", "gelu": "gelu"}  # theirs and ours
EPSILON = 1e-5  # of every LayerNorm there
NEVER = -100.0  # the bias of an id without a share of the probability, such as our start, which has no row there
# What config.json has to say, or to leave out, for the model to be a Transformer as it is here.
ONLY = {
    "model_type": "marian",
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
    "extra_pos_embeddings": 0,
}
ALIKE = ("layers", "attention_heads", "ffn_dim")  # of encoder and decoder
ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "dense": "out_proj"}
SUBLAYERS = {
    "encoder": {"mha": "self_attn", "layernorm1": "self_attn_layer_norm", "layernorm2": "final_layer_norm"},
    "decoder": {
        "mha1": "self_attn",
        "mha2": "encoder_attn",
        "layernorm1": "self_attn_layer_norm",
        "layernorm2": "encoder_attn_layer_norm",
        "layernorm3": "final_layer_norm",
    },
}
UNK_PIECE, END_PIECE, PAD_PIECE = "<unk>", "</s>", "<pad>"


class Weight(NamedTuple):
    """A weight here and there.

    Attributes:
        path: of the variable, after the model's name.
        names: of the tensor; it may be there under several.
        axes: what each axis here counts: "channels" of d_model, "source" or "target" ids, or what is in the same order.
        transposed: whether the axes are the other way round there, as in PyTorch's Linear.
    """

    path: str
    names: tuple[str, ...]
    axes: tuple[str | None, ...]
    transposed: bool = False


def weights_of(settings: ModelSettings, tied: bool) -> Iterator[Weight]:
    """All weights; `tied` says whether the projection is the target's embeddings."""

    def dense(path, name, axes):
        yield Weight(f"{path}/kernel", (f"{name}.weight",), axes, transposed=True)
        yield Weight(f"{path}/bias", (f"{name}.bias",), axes[1:])

    for stack, sublayers in SUBLAYERS.items():
        for i in range(settings.num_layers):
            path, name = f"{stack}/{stack[:3]}_layer{i + 1}", f"model.{stack}.layers.{i}"
            for sublayer, theirs in sublayers.items():
                if sublayer.startswith("mha"):
                    for inside, theirs_inside in ATTENTION.items():
                        axes = (None, "channels") if inside == "dense" else ("channels", None)
                        yield from dense(f"{path}/{sublayer}/{inside}", f"{name}.{theirs}.{theirs_inside}", axes)
                else:
                    yield Weight(f"{path}/{sublayer}/gamma", (f"{name}.{theirs}.weight",), ("channels",))
                    yield Weight(f"{path}/{sublayer}/beta", (f"{name}.{theirs}.bias",), ("channels",))
            yield from dense(f"{path}/ffn/inner", f"{name}.fc1", ("channels", None))
            yield from dense(f"{path}/ffn/outer", f"{name}.fc2", (None, "channels"))
    source, target = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
    if settings.share_embeddings:
        names = ("model.shared.weight", "lm_head.weight", source, target)
        yield Weight("encoder/embedding/embeddings", names, ("source", "channels"))
        yield Weight("final_bias", ("final_logits_bias",), ("target",))
    else:
        names = ("lm_head.weight", target) if tied else ("lm_head.weight",)
        yield Weight("encoder/embedding/embeddings", (source,), ("source", "channels"))
        yield Weight("decoder/embedding/embeddings", (target,), ("target", "channels"))
        yield Weight("final_layer/kernel", names, ("channels", "target"), transposed=True)
        yield Weight("final_layer/bias", ("final_logits_bias",), ("target",))


def variables_of(model: Transformer) -> dict:
    return {without_numbers(variable.path).partition("/")[2]: variable for variable in model.weights}


def channel_order(d_model: int) -> np.ndarray:
    """Their channel of each of ours."""
    channel = np.arange(d_model)
    return channel // 2 + channel % 2 * ((d_model + 1) // 2)


def reorder(value: np.ndarray, axes: tuple[str | None, ...], orders: dict[str, np.ndarray]) -> np.ndarray:
    for number, axis in enumerate(axes):
        value = value if axis is None else np.take(value, orders[axis], number)
    return value


# There to here


def import_marian(
    folder: Path, run_dir: Path, source_language: str | None = None, target_language: str | None = None
) -> None:
    """Write the run folder of a Marian model: settings.yaml, tokenizer/ and best.keras.

    Args:
        folder: with config.json, model.safetensors or pytorch_model.bin, source.spm, target.spm and vocab.json;
            target_vocab.json, generation_config.json and tokenizer_config.json are read where they are there.
        source_language, target_language: their codes; None for what tokenizer_config.json says.

    Raises:
        DataError: a file is missing or damaged, or the model is not a Transformer as it is here.
    """
    if not (folder / "config.json").exists():
        raise DataError(f"{folder}: no Marian model (it has no config.json)")
    config = read_json(folder / "config.json")
    check_supported(config, folder / "config.json")
    shared, tied = config.get("share_encoder_decoder_embeddings", True), config.get("tie_word_embeddings", True)
    sides, orders = {}, {"channels": channel_order(config["d_model"])}
    for side in ("source", "target"):
        path = folder / "vocab.json"
        if side == "target" and (folder / "target_vocab.json").exists():
            path = folder / "target_vocab.json"
        key = "vocab_size" if shared or side == "source" else "decoder_vocab_size"
        pieces, orders[side] = read_vocabulary(path, config, key)
        sides[side] = read_tokenizer(folder / f"{side}.spm", pieces)
    tokenizers = Tokenizers(**sides)
    told = generation(config, folder)
    forbidden = barred_pieces(told, config, folder, sides["target"].pieces, orders["target"])
    vocab_size = len(sides["target"].pieces)
    settings = settings_of(told, config, folder, vocab_size, forbidden, source_language, target_language)
    tensors, used = read_tensors(folder), set()
    model = make_model(settings.model, tokenizers)
    variables = variables_of(model)
    for weight in weights_of(settings.model, tied):
        variable = variables[weight.path]
        there = [name for name in weight.names if name in tensors]
        if not there:
            raise DataError(f"{folder}: the weights have no {weight.names[0]}")
        value = tensors[there[0]]
        if any(not np.array_equal(value, tensors[name]) for name in there[1:]):
            raise DataError(f"{folder}: {there[0]} and {there[1]} are not the same, and have to be")
        used.update(there)
        value = value[0] if there == ["final_logits_bias"] and value.ndim == 2 else value
        value = value.T if weight.transposed else value
        shape = zip(variable.shape, weight.axes, strict=True)
        wanted = tuple(size if axis is None else int(orders[axis].max()) + 1 for size, axis in shape)
        if value.shape != wanted:
            raise DataError(f"{folder}: {there[0]} has the sizes {value.shape}, by config.json they are {wanted}")
        value = reorder(value, weight.axes, orders).astype(np.float32)
        if weight.axes == ("target",):
            value[START] = NEVER
            if told.get("renormalize_logits"):  # what is barred, padding, has no share of the probability
                value[PAD] = NEVER
        variable.assign(value)
    others = [name for name in tensors if name not in used and not name.endswith("embed_positions.weight")]
    if others:
        raise DataError(f"{folder}: a Transformer as it is here has no place for {others[0]}")
    save_run(run_dir, settings, tokenizers, model)


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: damaged, or no JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object")
    return value


def check_supported(config: dict, path: Path) -> None:
    """Refuse, by name, what the model has and a Transformer here has not."""
    for name, value in ONLY.items():
        if config.get(name, value) != value:
            raise DataError(f"{path}: {name} {config[name]!r} is not supported, {value!r} is")
    for name in ALIKE:
        sizes = config.get(f"encoder_{name}"), config.get(f"decoder_{name}")
        if sizes[0] != sizes[1]:
            raise DataError(f"{path}: encoder_{name} {sizes[0]} with decoder_{name} {sizes[1]} is not supported")
    shared = config.get("share_encoder_decoder_embeddings", True)
    if shared and not config.get("tie_word_embeddings", True):
        raise DataError(f"{path}: tie_word_embeddings False with share_encoder_decoder_embeddings is not supported")
    if config.get("activation_function") not in ACTIVATIONS:
        raise DataError(
            f"{path}: activation_function {config.get('activation_function')!r} is not supported, "
            f"{', '.join(ACTIVATIONS)} are"
        )
    names = ["d_model", "vocab_size", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"]
    for name in [*names, "max_position_embeddings", "eos_token_id", "pad_token_id", "decoder_start_token_id"]:
        if type(config.get(name)) is not int:
            raise DataError(f"{path}: {name} must be a whole number, got {config.get(name)!r}")


def read_vocabulary(path: Path, config: dict, size_key: str) -> tuple[list[str], np.ndarray]:
    """Our pieces in the order of our ids, and their id of each."""
    vocabulary, size = read_json(path), config.get(size_key) or config["vocab_size"]
    if len(vocabulary) != size:
        raise DataError(f"{path} has {len(vocabulary)} pieces, {size_key} of config.json is {size}")
    numbers = list(vocabulary.values())
    if not all(type(number) is int for number in numbers) or sorted(numbers) != list(range(size)):
        raise DataError(f"{path}: the ids must be 0 to {size - 1}, each once")
    if UNK_PIECE not in vocabulary:
        raise DataError(f"{path} has no {UNK_PIECE}")
    special = {PAD: config["pad_token_id"], UNK: vocabulary[UNK_PIECE], START: config["decoder_start_token_id"]}
    special[END] = config["eos_token_id"]
    if not 0 <= min(special.values()) <= max(special.values()) < size:
        raise DataError(f"{path} has {size} pieces, config.json names the id {max(special.values())}")
    piece_of = {number: piece for piece, number in vocabulary.items()}
    order = [special[number] for number in range(len(special))]
    order += [number for number in range(size) if number not in order]
    names = [PAD_PIECE, UNK_PIECE, "<start>", END_PIECE]
    return names + [piece_of[number] for number in order[len(names) :]], np.array(order)


def read_tokenizer(path: Path, pieces: list[str]) -> MarianTokenizer:
    try:
        return MarianTokenizer(path.read_bytes(), pieces)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{path}: damaged, or no SentencePiece model ({first_line(error)})") from error


def generation(config: dict, folder: Path) -> dict:
    """What generation_config.json says; before transformers 4.26, config.json said it."""
    path = folder / "generation_config.json"
    return {**config, **(read_json(path) if path.exists() else {})}


def barred_pieces(told: dict, config: dict, folder: Path, pieces: list[str], order: np.ndarray) -> list[str]:
    barred = told.get("bad_words_ids") or []
    if not isinstance(barred, list) or any(not isinstance(ids, list) or len(ids) != 1 for ids in barred):
        raise DataError(f"{folder}: bad_words_ids must be lists of one id each, got {barred!r}")
    here = dict(zip(order.tolist(), pieces, strict=True))
    here.update({config["pad_token_id"]: PAD_PIECE, config["decoder_start_token_id"]: PAD_PIECE})
    return sorted({here[ids[0]] for ids in barred if ids[0] in here} - {PAD_PIECE})  # which is never emitted here


def whole_number(told: dict, name: str, folder: Path) -> int:
    value = told.get(name) or 0
    if type(value) is not int:
        raise DataError(f"{folder}: {name} must be a whole number, got {value!r}")
    return value


def settings_of(
    told: dict,
    config: dict,
    folder: Path,
    vocab_size: int,
    forbidden: list[str],
    source: str | None,
    target: str | None,
) -> Settings:
    path = folder / "tokenizer_config.json"
    languages = read_json(path) if path.exists() else {}
    source = source or languages.get("source_lang") or "und"
    target = target or languages.get("target_lang") or "und"
    longest = whole_number(told, "max_length", folder) or config["max_position_embeddings"]
    longest -= 1  # they count the start token
    shared = config.get("share_encoder_decoder_embeddings", True)
    values = {
        "model": {
            "num_layers": config["encoder_layers"],
            "d_model": config["d_model"],
            "num_heads": config["encoder_attention_heads"],
            "dff": config["encoder_ffn_dim"],
            "rate": config.get("dropout", 0.1),
            "attention_rate": config.get("attention_dropout", 0.0),
            "ffn_rate": config.get("activation_dropout", 0.0),
            "activation": ACTIVATIONS[config["activation_function"]],
            "share_embeddings": shared,
            "norm_epsilon": EPSILON,
            "scale_embeddings": config.get("scale_embedding", False),
            "output_bias": shared,
            "pe_input": config["max_position_embeddings"],
            "pe_target": config["max_position_embeddings"],
        },
        "data": {
            "train": (f"train.{source}", f"train.{target}"),
            "dev": (f"dev.{source}", f"dev.{target}"),
            "source_language": source,
            "target_language": target,
            "vocab_size": vocab_size,
            "joint_vocabulary": shared,
        },
        "decoding": {
            "beam_size": told.get("num_beams") or 1,
            "length_norm": "average",
            "length_penalty": told.get("length_penalty", 1.0),
            "max_length": longest,
            "max_length_extra": longest,
            "min_length": whole_number(told, "min_length", folder),  # by theirs, the end may come as this
            "no_repeat_ngram": told.get("no_repeat_ngram_size") or 0,
            "forbidden": forbidden,
        },
    }
    return settings_from(values, str(folder))


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The weights by name, from model.safetensors or, with PyTorch, pytorch_model.bin."""
    path = folder / "model.safetensors"
    if path.exists():
        try:
            with safe_open(path, "np") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: damaged ({first_line(error)})") from error
    path = folder / "pytorch_model.bin"
    if not path.exists():
        raise DataError(f"{folder}: neither model.safetensors nor pytorch_model.bin")
    try:
        import torch
    except ImportError:
        raise DataError(f"{path} takes PyTorch to read: pip install torch, or get model.safetensors") from None
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)  # a pickle, of which nothing is run
        return {name: tensor.float().numpy() for name, tensor in tensors.items()}
    except Exception as error:  # pickle, zipfile and PyTorch each have their own for a damaged file
        raise DataError(f"{path}: damaged, or more than weights ({first_line(error)})") from error


# Here to there


def export_marian(run_dir: Path, out: Path, decoding: DecodingSettings | None = None) -> None:
    """Write the best model of a run as a folder that Hugging Face's MarianMTModel and MarianTokenizer load.

    Args:
        decoding: what generation_config.json is to say; None for the run's own settings.

    Raises:
        DataError: `run_dir` is no run folder, or has no model yet.
        UsageError: MarianMTModel has not what the model has.
    """
    settings = run_settings(run_dir)
    decoding = decoding or settings.decoding
    settings = settings.model_copy(update={"decoding": decoding})
    if decoding.length_norm != "average" and decoding.length_penalty:
        raise UsageError("decoding.length_norm gnmt: transformers divides by n^a alone (average)")
    for name, value in {"method": "beam", "min_length_factor": 0}.items():
        if getattr(decoding, name) != value:
            raise UsageError(f"decoding.{name} {getattr(decoding, name)}: a Marian model's settings do not have it")
    if decoding.precision != "float32":
        raise UsageError(f"decoding.precision {decoding.precision}: a Marian model is float32")
    if settings.model.norm != "post":
        raise UsageError(f"{run_dir}: a Marian model normalises after each sublayer, this one has model.norm: pre")
    model, tokenizers = load_run(run_dir)
    card = make_card(run_dir, settings, USAGE)
    shared = settings.model.share_embeddings
    # Their decoder begins with padding: our start's rows stand for it. Of two vocabularies it must have the same id.
    orders, vocabularies = {"channels": np.argsort(channel_order(settings.model.d_model))}, {}
    for side, tokenizer in tokenizers._asdict().items():
        rest = list(range(len((PAD, UNK, START, END)), len(tokenizer.pieces)))
        orders[side] = np.array([END, UNK, *rest, START] if shared else [END, UNK, START, *rest])
        names = {END: END_PIECE, UNK: UNK_PIECE, START: PAD_PIECE}
        pieces = [names.get(number, tokenizer.pieces[number]) for number in orders[side].tolist()]
        vocabularies[side] = {piece: number for number, piece in enumerate(pieces)}
    pad = vocabularies["target"][PAD_PIECE]
    variables, tensors = variables_of(model), {}
    for weight in weights_of(settings.model, tied=False):
        no_bias = np.zeros(model.target_vocab_size, np.float32)  # our shared embeddings may have none
        value = variables[weight.path].numpy() if weight.path in variables else no_bias
        reordered = reorder(value, weight.axes, orders)
        if weight.axes == ("target",):
            reordered[pad] = value[PAD]
            reordered = reordered[None]
        tensors[weight.names[0]] = np.ascontiguousarray(reordered.T if weight.transposed else reordered)
    model_settings = settings.model
    ids = {"eos_token_id": 0, "forced_eos_token_id": 0, "pad_token_id": pad, "decoder_start_token_id": pad}
    config = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "activation_function": next(name for name, ours in ACTIVATIONS.items() if ours == model_settings.activation),
        "d_model": model_settings.d_model,
        "dropout": model_settings.rate,
        "attention_dropout": model_settings.attention_rate,
        "activation_dropout": model_settings.ffn_rate,
        "max_position_embeddings": max(model_settings.pe_input, model_settings.pe_target),
        "scale_embedding": model_settings.scale_embeddings,
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": shared,
        "vocab_size": len(vocabularies["source"]),
        "decoder_vocab_size": len(vocabularies["target"]),
        **ids,
    }
    sizes = {"layers": model_settings.num_layers, "attention_heads": model_settings.num_heads}
    for name, size in {**sizes, "ffn_dim": model_settings.dff}.items():
        config |= {f"encoder_{name}": size, f"decoder_{name}": size}
    number_of = {ours: theirs for theirs, ours in enumerate(orders["target"].tolist())}
    barred = {START, *forbidden_ids(decoding, tokenizers)} - {PAD}  # which has no number there
    longest = min(decoding.max_length or model_settings.pe_target, model_settings.pe_target)
    search = {
        **ids,
        "num_beams": decoding.beam_size,
        "length_penalty": decoding.length_penalty,
        "max_length": longest + 1,  # with the start
        "min_length": decoding.min_length,
        "no_repeat_ngram_size": decoding.no_repeat_ngram,
        "bad_words_ids": [[number_of[number]] for number in sorted(barred)],
    }
    words = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": settings.data.source_language,
        "target_lang": settings.data.target_language,
        "separate_vocabs": not shared,
        "model_max_length": model_settings.pe_input,
    }
    files = {"config.json": config, "generation_config.json": search, "tokenizer_config.json": words}
    files["vocab.json"] = vocabularies["source"]
    if not shared:
        files["target_vocab.json"] = vocabularies["target"]
    with whole(out) as beside:
        beside.mkdir()
        for name, content in files.items():
            (beside / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        for side, tokenizer in tokenizers._asdict().items():
            (beside / f"{side}.spm").write_bytes(tokenizer.model)
        save_file(tensors, beside / "model.safetensors", {"format": "pt"})
        (beside / CARD).write_text(card, encoding="utf-8")

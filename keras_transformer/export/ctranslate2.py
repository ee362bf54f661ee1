"""A run as a CTranslate2 model, and such a model behind `Translator`: its products in int8 are a CPU's fastest."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_transformer.config import DecodingSettings, run_settings, settings_yaml
from keras_transformer.data.tokenizer import Tokenizers, load_tokenizers
from keras_transformer.errors import DataError, UsageError, first_line
from keras_transformer.export.card import CARD, make_card
from keras_transformer.files import whole
from keras_transformer.ids import END, PAD, START, UNK
from keras_transformer.model import Transformer
from keras_transformer.precision import cores
from keras_transformer.runs import load_run
from keras_transformer.translator_module import BLANK, cut, forbidden_ids, length_limits

USAGE = """
With keras-transformer and `pip install ctranslate2`, text in and text out:

```
keras-transformer translate FOLDER text.txt
```

In Python, `keras_transformer.Translator.load("FOLDER").translate(["..."])`. With `ctranslate2` alone, source and
target are pieces of `tokenizer/`, and the source ends with the piece `</s>`; suppress the pieces of padding and start.

CTranslate2 divides log-probabilities by n^length_penalty, n with the end counted. It takes one maximum length for a
batch (`max_decoding_length`), and ranks what came to it without an end among the rest; `Translator` gives each source
its own maximum, `max_length_factor` times its pieces and `max_length_extra` more, and puts what did not end last.
"""
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "silu": "SWISH"}


def import_ctranslate2():
    try:
        import ctranslate2
    except ImportError:
        raise UsageError("CTranslate2 is not installed: pip install ctranslate2") from None
    return ctranslate2


def export_ctranslate2(run_dir: Path, out: Path, decoding: DecodingSettings | None = None) -> None:
    """Write the best model of a run, its tokenizers and settings as a CTranslate2 folder, whole or not at all.

    Args:
        decoding: how it is to search, of which the precision is that of the weights, float32 or int8; None for the
            run's own settings.

    Raises:
        DataError: `run_dir` is no run folder, or has no model yet.
        UsageError: CTranslate2 is not installed, or does not search in this way.
    """
    settings = run_settings(run_dir)
    settings = settings.model_copy(update={"decoding": decoding or settings.decoding})
    check_search(settings.decoding)
    model, tokenizers = load_run(run_dir)
    card = make_card(run_dir, settings, USAGE)
    forbidden_ids(settings.decoding, tokenizers)
    specification = specify(model, tokenizers)
    specification.validate()
    specification.optimize(quantization=settings.decoding.precision)
    with whole(out) as beside:
        beside.mkdir()
        specification.save(str(beside))
        (beside / "settings.yaml").write_text(settings_yaml(settings), encoding="utf-8")
        tokenizers.save(beside / "tokenizer")
        (beside / CARD).write_text(card, encoding="utf-8")


def specify(model: Transformer, tokenizers: Tokenizers):
    """The model as CTranslate2's specification of a Transformer."""
    specs = import_ctranslate2().specs
    spec = specs.TransformerSpec.from_config(
        model.num_layers,
        model.num_heads,
        pre_norm=model.norm == "pre",
        activation=getattr(specs.Activation, ACTIVATIONS[model.activation]),
    )

    def normalization(into, layer):
        into.gamma, into.beta = layer.gamma.numpy(), layer.beta.numpy()

    def linear(into, *denses):
        """Denses side by side, (out, in)."""
        into.weight = np.concatenate([dense.kernel.numpy().T for dense in denses])
        into.bias = np.concatenate([dense.bias.numpy() for dense in denses])

    def feed_forward(into, layer, layernorm):
        normalization(into.layer_norm, layernorm)
        inner, *_, outer = layer.ffn.layers
        linear(into.linear_0, inner)
        linear(into.linear_1, outer)

    def self_attention(into, mha, layernorm):
        normalization(into.layer_norm, layernorm)
        linear(into.linear[0], mha.wq, mha.wk, mha.wv)
        linear(into.linear[1], mha.dense)

    for into, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        into.scale_embeddings = model.scale_embeddings
        into.position_encodings.encodings = stack.pos_encoding.encoding[0]
        if stack.layernorm is not None:
            normalization(into.layer_norm, stack.layernorm)
    spec.encoder.embeddings[0].weight = model.encoder.embedding.embeddings.numpy()
    spec.decoder.embeddings.weight = model.decoder.embedding.embeddings.numpy()
    kernel, bias = model.projection()
    spec.decoder.projection.weight = np.ascontiguousarray(kernel.numpy().T)
    if bias is not None:
        spec.decoder.projection.bias = bias.numpy()
    for into, layer in zip(spec.encoder.layer, model.encoder.enc_layers, strict=True):
        self_attention(into.self_attention, layer.mha, layer.layernorm1)
        feed_forward(into.ffn, layer, layer.layernorm2)
    for into, layer in zip(spec.decoder.layer, model.decoder.dec_layers, strict=True):
        self_attention(into.self_attention, layer.mha1, layer.layernorm1)
        normalization(into.attention.layer_norm, layer.layernorm2)
        linear(into.attention.linear[0], layer.mha2.wq)
        linear(into.attention.linear[1], layer.mha2.wk, layer.mha2.wv)
        linear(into.attention.linear[2], layer.mha2.dense)
        feed_forward(into.ffn, layer, layer.layernorm3)
    spec.register_source_vocabulary(tokenizers.source.pieces)
    spec.register_target_vocabulary(tokenizers.target.pieces)
    pieces = tokenizers.target.pieces
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = pieces[UNK], pieces[START], pieces[END]
    spec.config.decoder_start_token = pieces[START]
    spec.config.layer_norm_epsilon = model.norm_epsilon
    return spec


def check_search(decoding: DecodingSettings) -> None:
    """Refuse what CTranslate2 does not do, or does otherwise."""
    if decoding.method != "beam":
        raise UsageError(f"decoding.method {decoding.method}: a CTranslate2 model is searched by beam or greedily")
    if decoding.length_norm != "average" and decoding.length_penalty:
        raise UsageError("decoding.length_norm gnmt: CTranslate2 divides by n^a alone (average)")
    if decoding.patience is None and decoding.length_penalty:
        raise UsageError("decoding.patience null: with a length_penalty, CTranslate2 takes a number")
    if decoding.patience is not None and decoding.patience < 1:
        raise UsageError(f"decoding.patience {decoding.patience}: a CTranslate2 model takes 1 or more")
    if decoding.precision == "bfloat16":
        raise UsageError("decoding.precision bfloat16: a CTranslate2 model is float32 or int8")


class CTranslate2Module:
    """A CTranslate2 folder as a TranslatorModule: the same functions, under the same names, but `attention`.

    CTranslate2 takes one maximum length for a whole batch, and ranks hypotheses that came to it without an end among
    those that ended. Here they come last of those it gives; and a source with a translation that did not end, or is
    longer than its own maximum, is translated again alone, so that it does not depend on its neighbours. What is barred
    (padding, start, `forbidden`, repeated n-grams, an end that is too early) has no share of the probability there, and
    keeps it here: of a well-trained model that is a difference in the third digit.
    """

    def __init__(self, folder: Path, decoding: DecodingSettings):
        ctranslate2 = import_ctranslate2()
        check_search(decoding)
        settings = run_settings(folder)
        if decoding.precision != settings.decoding.precision:
            raise UsageError(
                f"{folder}: its weights are {settings.decoding.precision}; "
                f"`export --precision {decoding.precision}` makes others of the run"
            )
        self.tokenizers = load_tokenizers(folder / "tokenizer")
        source, target = self.tokenizers
        forbidden_ids(decoding, self.tokenizers)
        self.tables = settings.model.pe_input, settings.model.pe_target
        try:
            # As many batches at a time as `Translator` hands over, each on one core.
            threads = {"inter_threads": cores(), "intra_threads": 1}
            self.translator = ctranslate2.Translator(str(folder), device="cpu", **threads)
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{folder}: damaged CTranslate2 model ({first_line(error)})") from error
        self.decoding = decoding
        self.source_pieces, self.target_pieces = np.array(source.pieces, object), np.array(target.pieces, object)
        self.id_of = {piece: number for number, piece in enumerate(target.pieces)}
        never = [target.pieces[PAD], target.pieces[START], *decoding.forbidden]
        self.options = {
            "beam_size": decoding.beam_size,
            "length_penalty": decoding.length_penalty,
            "patience": 1.0 if decoding.patience is None else decoding.patience,
            "no_repeat_ngram_size": decoding.no_repeat_ngram,
            "suppress_sequences": [[piece] for piece in never],
            "max_input_length": 0,
            "return_scores": True,
            "return_end_token": True,
        }

    def encode(self, text):
        text = tf.where(tf.strings.regex_full_match(text, BLANK), "", text)
        return cut(self.tokenizers.source.encode(text), self.tables[0])

    def encode_target(self, text):
        return cut(self.tokenizers.target.encode(text), self.tables[1])

    def pieces(self):
        return tf.constant(self.target_pieces.tolist())

    def decode(self, inp, prefix, rows) -> dict[str, tf.Tensor]:
        """As TranslatorModule's; `rows` are of no consequence."""
        most, fewest = (limit.numpy() for limit in length_limits(inp, self.decoding, self.tables[1]))
        inp, prefix, n_best = inp.numpy(), prefix.numpy(), self.decoding.n_best
        found = [[([], 0.0)] * n_best for _ in inp]
        # A hypothesis is its ids, the end included, and their log-probability. CTranslate2 counts none for a prefix.
        forced = self.log_probs(inp, prefix, ended=False).sum(1)
        # All of a beam, or with n_best it would end before the best of them were found.
        count = 1 if n_best == 1 and prefix.shape[1] == 0 else self.decoding.beam_size
        alpha = self.decoding.length_penalty

        def rank(hypothesis):
            ids, log_prob = hypothesis
            return ids[-1] != END, -log_prob / len(ids) ** alpha

        def search(some, longest, count):
            sources, prefixes = (
                self.tokens(self.source_pieces, inp[some]),
                self.tokens(self.target_pieces, prefix[some]),
            )
            # The end token counts here, and does not in CTranslate2's minimum.
            limits = {"max_decoding_length": longest, "min_decoding_length": max(0, int(fewest[some[0]]) - 1)}
            limits["num_hypotheses"] = count
            results = self.translator.translate_batch(sources, prefixes, **limits, **self.options)
            for row, result in zip(some, results, strict=True):
                hypotheses = [
                    ([self.id_of[piece] for piece in pieces], score * len(pieces) ** alpha + forced[row])
                    for pieces, score in zip(result.hypotheses, result.scores, strict=True)
                ]
                found[row] = sorted(hypotheses, key=rank)[:n_best]

        for minimum in np.unique(fewest):
            some = np.flatnonzero((fewest == minimum) & (most > 0))
            if len(some):
                search(some, int(most[some].max()), count)
        for row in np.flatnonzero(most):
            if any(len(ids) > most[row] or ids[-1] != END for ids, _ in found[row]):
                search(np.array([row]), int(most[row]), self.decoding.beam_size)
        ids = tf.ragged.constant([[ids for ids, _ in n_best] for n_best in found], tf.int32, 2).to_tensor(PAD)
        log_prob = tf.constant([[log_prob for _, log_prob in n_best] for n_best in found], tf.float32)
        batch, n, longest = tf.unstack(tf.shape(ids))
        text = tf.reshape(self.tokenizers.target.decode(tf.reshape(ids, (batch * n, longest))), (batch, n))
        score = log_prob / tf.cast(tf.maximum(tf.math.count_nonzero(ids, -1), 1), tf.float32) ** alpha
        return {"text": text, "ids": ids, "log_prob": log_prob, "score": score}

    def score(self, inp, tar) -> tf.Tensor:
        """As TranslatorModule's."""
        return tf.constant(self.log_probs(inp.numpy(), tar.numpy(), ended=True))

    def log_probs(self, inp: np.ndarray, tar: np.ndarray, ended: bool) -> np.ndarray:
        """The log-probability of each target id (batch, tar_len), of which the last of a row is the end if `ended`."""
        log_probs = np.zeros(tar.shape, np.float32)
        if tar.shape[1]:
            sources, targets = self.tokens(self.source_pieces, inp), self.tokens(self.target_pieces, tar)
            targets = [target[:-1] if ended else target for target in targets]
            results = self.translator.score_batch(sources, targets, max_input_length=0)
            for row, result, length in zip(log_probs, results, np.count_nonzero(tar, 1), strict=True):
                row[:length] = result.log_probs[:length]
        return log_probs

    def attention(self, inp, tar):
        raise UsageError("a CTranslate2 model does not give its attention: take the run it was exported from")

    @staticmethod
    def tokens(pieces: np.ndarray, ids: np.ndarray) -> list[list[str]]:
        """CTranslate2 takes no ids."""
        return [pieces[row[row != PAD]].tolist() for row in ids]

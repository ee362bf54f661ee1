"""The dev text, and what a model is worth on it while it trains."""

import keras

from keras_transformer.config import Settings
from keras_transformer.data.pipeline import Corpus, token_batches
from keras_transformer.data.tokenizer import Tokenizers
from keras_transformer.evaluation import Scores, evaluate
from keras_transformer.losses import TokenAccuracy
from keras_transformer.model import Transformer
from keras_transformer.step import make_evaluate_step
from keras_transformer.translator import Translator
from keras_transformer.translator_module import TranslatorModule, copy_variables


class DevSet:
    """Measures a model on the dev text: loss and accuracy by teacher forcing, BLEU and exact match by translating."""

    def __init__(
        self,
        model: Transformer,
        tokenizers: Tokenizers,
        pairs: list[tuple[str, str]],
        corpus: Corpus,
        settings: Settings,
    ):
        """`corpus` is `pairs` as ids."""
        self.trained = model
        # In float32, whatever it is trained in, and without replicas.
        self.model = Transformer.from_config({**model.get_config(), "dtype": "float32"})
        self.model.build((None, None), (None, None))
        self.loss, self.accuracy = keras.metrics.Mean(), TokenAccuracy()
        self.step = make_evaluate_step(self.model, self.loss, self.accuracy)
        module = TranslatorModule(self.model, tokenizers, settings.decoding)
        self.translator = Translator(module, settings.decoding)
        self.pairs, self.corpus, self.settings = pairs, corpus, settings

    def measure(self) -> tuple[dict[str, float], Scores, list[tuple[str, str, str]]]:
        """Figures, scores, and some sources with translation and reference, for the weights that the model has now."""
        copy_variables(self.trained, self.model)
        self.loss.reset_state()
        self.accuracy.reset_state()
        for inp, tar in token_batches(self.corpus, self.settings.training.tokens_per_batch, seed=0, epochs=1):
            self.step(inp, tar)
        self.translator.module.update()
        sources, references = map(list, zip(*self.pairs, strict=True))
        translations = self.translator.translate(sources)
        data = self.settings.data
        scores = evaluate(translations, references, data.target_language, data.bleu_tokenizer)
        examples = list(zip(sources[:5], translations[:5], references[:5], strict=True))
        return (
            {
                "dev_loss": float(self.loss.result()),
                "dev_accuracy": float(self.accuracy.result()),
                "dev_bleu": scores.bleu,
                "dev_exact_match": scores.exact_match,
            },
            scores,
            examples,
        )

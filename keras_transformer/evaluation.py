"""Scores of translations, by sacreBLEU on detokenised text."""

import re
from typing import NamedTuple

from sacrebleu.metrics import BLEU, CHRF

from keras_transformer.errors import DataError, UsageError


class Scores(NamedTuple):
    """BLEU and chrF, from 0 to 100, with what sacreBLEU measured them by; `exact_match` is a share of 1."""

    bleu: float
    chrf: float
    exact_match: float
    bleu_signature: str
    chrf_signature: str

    def __str__(self):
        return (
            f"BLEU {self.bleu:.2f} {self.bleu_signature}\n"
            f"chrF2 {self.chrf:.2f} {self.chrf_signature}\n"
            f"exact match {100 * self.exact_match:.1f} %"
        )


def make_bleu(language: str, tokenizer: str | None = None) -> BLEU:
    """sacreBLEU's BLEU with its tokenizer for a language: Chinese, Japanese and Korean have their own, the rest 13a.

    Args:
        language: the target's code, such as "de".
        tokenizer: another of sacreBLEU's tokenizers, "none" for text that is tokenised already.

    Raises:
        UsageError: the tokenizer needs a package that is not installed.
    """
    code = re.split("[-_]", language)[0].lower()
    try:
        # It warns of text that looks tokenised, which is what "none" is for.
        return BLEU(trg_lang=code) if tokenizer is None else BLEU(tokenize=tokenizer, force=tokenizer == "none")
    except (ImportError, RuntimeError) as error:
        extra = f"pip install 'sacrebleu[{tokenizer.split('-')[0] if tokenizer else code}]'"
        raise UsageError(f"BLEU on {language!r} needs a tokenizer that is not installed: {extra}") from error


def evaluate(hypotheses: list[str], references: list[str], language: str, tokenizer: str | None = None) -> Scores:
    """Score translations against one reference each.

    Args:
        hypotheses, references: detokenised lines, as many of one as of the other.
        language, tokenizer: as `make_bleu` takes them.

    Raises:
        DataError: their numbers differ, or there are none.
    """
    if len(hypotheses) != len(references):
        raise DataError(f"{len(hypotheses)} translations, but {len(references)} references")
    if not references:
        raise DataError("no translations to score")
    bleu, chrf = make_bleu(language, tokenizer), CHRF()
    bleu_score = bleu.corpus_score(hypotheses, [references]).score
    chrf_score = chrf.corpus_score(hypotheses, [references]).score
    exact = sum(map(str.__eq__, hypotheses, references)) / len(references)
    return Scores(bleu_score, chrf_score, exact, str(bleu.get_signature()), str(chrf.get_signature()))


def bleu_signature(language: str, tokenizer: str | None = None) -> str:
    """sacreBLEU's signature of what `evaluate` measures with these, which it gives after a first score alone."""
    bleu = make_bleu(language, tokenizer)
    bleu.corpus_score(["a"], [["a"]])
    return str(bleu.get_signature())

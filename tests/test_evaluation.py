"""Scores: sacreBLEU's own, on detokenised text, with signatures."""

import importlib

import pytest
import sacrebleu

from keras_transformer.errors import DataError, UsageError
from keras_transformer.evaluation import evaluate, make_bleu
from keras_transformer.files import read_lines

GERMAN = (
    ["Der Hund läuft heute schnell nach Hause .", "Es ist 12,00\u00a0€ ,oder?", "guten Tag zusammen, liebe Leute!"],
    ["Der Hund läuft heute schnell nach Hause.", "Es ist 12,00\u00a0€, oder?", "Guten Morgen zusammen, liebe Leute!"],
)
CHINESE = (["我们今天去北京看长城。", "他有12本新书。"], ["我们今天去北京看故宫。", "他有 12 本书。"])


@pytest.mark.parametrize(
    ("language", "texts", "tokenizer"),
    [("de", GERMAN, "13a"), ("pt-BR", GERMAN, "13a"), ("zh", CHINESE, "zh"), ("zh_Hans", CHINESE, "zh")],
)
def test_scores_are_sacrebleus(language, texts, tokenizer):
    """C8, https://github.com/tensorflow/tensor2tensor/issues/587,
    https://github.com/tensorflow/tensor2tensor/issues/569, https://github.com/tensorflow/tensor2tensor/issues/343:
    BLEU of the texts as they are, case included, with the tokenizer named in the signature."""
    scores = evaluate(*texts, language)
    hypotheses, references = texts
    bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenizer).score
    chrf = sacrebleu.corpus_chrf(hypotheses, [references]).score
    assert scores.bleu == pytest.approx(bleu, abs=0.01) and 5 < bleu < 95
    assert scores.chrf == pytest.approx(chrf, abs=0.01) and 5 < chrf < 95
    assert f"|tok:{tokenizer}|" in scores.bleu_signature and "|case:mixed|" in scores.bleu_signature
    assert scores.bleu_signature in str(scores) and scores.chrf_signature in str(scores)
    assert f"BLEU {bleu:.2f} " in str(scores)


def test_chinese_without_its_tokenizer_would_be_another_score():
    """A Chinese sentence has no spaces: 13a sees one word."""
    assert evaluate(*CHINESE, "de").bleu < evaluate(*CHINESE, "zh").bleu - 20


def test_text_that_is_tokenised_is_left_so():
    """Two of three tokens right, of which 13a would make four of five: "a.b" and "c." are one token each."""
    hypotheses, references = ["a.b c. d e f"], ["a.b c. d e g"]
    scores = evaluate(hypotheses, references, "de", "none")
    assert "|tok:none|" in scores.bleu_signature
    assert scores.bleu == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none").score)
    assert scores.bleu != pytest.approx(evaluate(hypotheses, references, "de").bleu)


def test_exact_match():
    scores = evaluate(["a b", "c", "e"], ["a b", "C", "d"], "en")
    assert scores.exact_match == pytest.approx(1 / 3)
    assert str(scores).endswith("exact match 33.3 %")


@pytest.mark.parametrize("language", ["ja", "ko", "JA-jp", "ko_KR"])
def test_missing_tokenizer_names_the_extra(monkeypatch, language):
    extra = language[:2].lower()
    module = importlib.import_module(f"sacrebleu.tokenizers.tokenizer_{extra}_mecab")
    monkeypatch.setattr(module, "MeCab", None)  # as if it were not installed
    with pytest.raises(UsageError, match=rf"BLEU on '{language}' .*pip install 'sacrebleu\[{extra}\]'$"):
        make_bleu(language)


@pytest.mark.parametrize("language", ["en", "kok", "jam", "arz"])
def test_other_languages_need_no_extra(language):
    """Konkani (kok) is no Korean."""
    assert make_bleu(language).tokenizer.signature() == "13a"


LINES = ["The cat sat on the old mat.", "A second line of five words.", "And a third one for good luck."]


def test_identical_lines_are_perfect():
    """C9, https://github.com/google/seq2seq/issues/106, https://github.com/tensorflow/nmt/pull/483,
    https://github.com/browsermt/students/issues/10."""
    scores = evaluate(LINES, LINES, "en")
    assert (scores.bleu, scores.chrf, scores.exact_match) == (pytest.approx(100), pytest.approx(100), 1)


def test_empty_translations_score_nothing():
    """C9, https://github.com/google/seq2seq/issues/106: no division by zero."""
    scores = evaluate(["", "", ""], LINES, "en")
    assert (scores.bleu, scores.chrf, scores.exact_match) == (0, 0, 0)


def test_an_empty_translation_costs():
    """C9, https://github.com/browsermt/students/issues/10: the words that are missing are paid for."""
    scores = evaluate([*LINES[:2], ""], LINES, "en")
    assert 0 < scores.bleu < 90 and 0 < scores.chrf < 90
    assert scores.exact_match == pytest.approx(2 / 3)


def test_an_empty_reference_is_allowed():
    """C9, https://github.com/tensorflow/nmt/pull/483: what was said for nothing costs."""
    assert evaluate([*LINES, ""], [*LINES, ""], "en").bleu == pytest.approx(100)
    assert 50 < evaluate([*LINES, "more words"], [*LINES, ""], "en").bleu < 100
    assert evaluate(["more words"], [""], "en").bleu == 0


def test_other_numbers_of_lines_are_no_score():
    """C10, https://github.com/mjpost/sacrebleu/issues/160."""
    with pytest.raises(DataError, match="^3 translations, but 4 references$"):
        evaluate(LINES, [*LINES, "one more"], "en")
    with pytest.raises(DataError, match="^no translations to score$"):
        evaluate([], [], "en")


def test_references_from_windows_score_the_same(tmp_path):
    """C5, https://github.com/mjpost/sacrebleu/pull/24: "\\r\\n" is no word of the reference."""
    (tmp_path / "unix").write_bytes("".join(f"{line}\n" for line in LINES).encode())
    (tmp_path / "windows").write_bytes("".join(f"{line}\r\n" for line in LINES).encode())
    hypotheses = [line.replace("a ", "one ") for line in LINES]
    unix, windows = (evaluate(hypotheses, list(read_lines(tmp_path / name)), "en") for name in ("unix", "windows"))
    assert windows == unix and 0 < unix.bleu < 100

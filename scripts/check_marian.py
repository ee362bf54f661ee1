"""Check that Marian models give Hugging Face's numbers here, and this package's models theirs there.

    pip install torch transformers
    python scripts/check_marian.py [--fixture tests/fixtures/marian]

A small MarianMTModel, fitted to sentences from a few words, and one of random weights in the shape of OPUS-MT's are
imported: logits to 1e-4, and of the fitted one the translations of 200 texts by beam search of 4. The fitted one is
exported again and does the same there. With --fixture, it is kept for the tests, with what transformers made of it.
"""

import itertools
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import sentencepiece
import torch
import transformers
import typer

# A word in English, German and French.
NUMBERS = ["two zwei deux", "three drei trois", "four vier quatre", "five fünf cinq", "six sechs six", "ten zehn dix"]
ADJECTIVES = ["small kleine petits", "big große grands", "old alte vieux", "young junge jeunes", "", ""]
ANIMALS = ["dogs Hunde chiens", "cats Katzen chats", "birds Vögel oiseaux", "horses Pferde chevaux", "cows Kühe bœufs"]
VERBS = ["sleep schlafen dorment", "eat essen mangent", "play spielen jouent", "wait warten attendent"]
PLACES = ["in|the|garden im|Garten dans|le|jardin", "at|home zu|Hause à|la|maison", "here hier ici", "", ""]
LANGUAGES = (">>deu<<", ">>fra<<")
ODD = [
    "½ cats",
    "Kühe schlafen",
    "cats  and   dogs!",
    "猫",
    "cats?",
    ">>fra<<",
    "two >>deu<< cats",
    "a" * 60,
    "e\u0301t\u00e9 2",
]


def sentences() -> list[tuple[str, str]]:
    """Every text, with the code of its language before it, and its translation."""
    pairs = []
    for words in itertools.product(NUMBERS, dict.fromkeys(ADJECTIVES), ANIMALS, VERBS, dict.fromkeys(PLACES)):
        english, *others = (
            " ".join(side).replace("|", " ").strip() for side in zip(*(w.split() for w in words if w), strict=True)
        )
        pairs += [
            (f"{code} {english.capitalize()}.", f"{other.capitalize()}.")
            for code, other in zip(LANGUAGES, others, strict=True)
        ]
    random.Random(0).shuffle(pairs)
    return pairs


def write_tokenizer(folder: Path, pairs: list[tuple[str, str]]) -> transformers.MarianTokenizer:
    """As OPUS-MT has it: a SentencePiece model for each side, one vocabulary of the pieces of both."""
    pieces = ["</s>", "<unk>", *LANGUAGES]
    for side, lines in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line.removeprefix(LANGUAGES[0]).removeprefix(LANGUAGES[1]) for line in lines),
            model_prefix=str(folder / side),
            vocab_size=120,
            hard_vocab_limit=False,
            model_type="unigram",
            normalization_rule_name="nmt_nfkc",
            minloglevel=2,
        )
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        (folder / f"{side}.vocab").unlink()
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        pieces += [processor.id_to_piece(i) for i in range(3, processor.vocab_size())]
    vocabulary = {piece: number for number, piece in enumerate([*dict.fromkeys(pieces), "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False, indent=1), encoding="utf-8")
    names = (str(folder / name) for name in ("source.spm", "target.spm", "vocab.json"))
    return transformers.MarianTokenizer(*names, source_lang="eng", target_lang="deu+fra")


def new_model(vocab_size: int, layers: int, d_model: int, heads: int, dff: int) -> transformers.MarianMTModel:
    """With weights that differ from their first values, which are ones and zeros in many places."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": dff}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    pad = vocab_size - 1
    config = transformers.MarianConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        **sides,
        activation_function="swish",
        scale_embedding=True,
        max_position_embeddings=512 if d_model > 100 else 64,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config)
    model.generation_config = transformers.GenerationConfig(
        num_beams=4,
        max_length=config.max_position_embeddings,
        bad_words_ids=[[pad]],
        renormalize_logits=True,  # as OPUS-MT's: padding has no share of the probability
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=0,
        forced_eos_token_id=0,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
        model.model.shared.weight[pad] = 0.0
        model.final_logits_bias.normal_(std=0.5)
        model.final_logits_bias[0, pad] = 0.0
    return model.eval()


def fit(model, tokenizer, pairs: list[tuple[str, str]], steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    model.train()
    for step in range(steps):
        sources, targets = zip(*random.Random(step).sample(pairs, 64), strict=True)
        batch = tokenizer(list(sources), text_target=list(targets), padding=True, return_tensors="pt")
        batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step + 1}: loss {loss.item():.3f}", file=sys.stderr)
    model.eval()


def translate(folder: Path, texts: list[str]) -> list[str]:
    """By transformers."""
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    found = []
    with torch.no_grad():
        for text in texts:
            found += tokenizer.batch_decode(
                model.generate(**tokenizer([text], return_tensors="pt")), skip_special_tokens=True
            )
    return found


def logits(folder: Path, inp: np.ndarray, tar: np.ndarray) -> np.ndarray:
    """By transformers, of the pieces in the order of their ids."""
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    with torch.no_grad():
        mask = torch.from_numpy(inp != model.config.pad_token_id)
        return model(
            input_ids=torch.from_numpy(inp), attention_mask=mask, decoder_input_ids=torch.from_numpy(tar)
        ).logits.numpy()


def compare_logits(folder: Path, run: Path, name: str) -> dict[str, np.ndarray]:
    """Of random ids with padding; in theirs 0 is the end, 1 unknown, the last padding and start. Returns them."""
    from keras_transformer.runs import load_run

    model, tokenizers = load_run(run)
    size = model.target_vocab_size - 1
    rng = np.random.default_rng(0)
    inp, tar = rng.integers(2, size - 1, (3, 17)), rng.integers(2, size - 1, (3, 11))
    inp[:, -1], tar[:, 0] = 0, size - 1
    inp[1, 9:] = size - 1
    inp[1, 8] = 0
    theirs = logits(folder, inp, tar)
    ours_of = np.concatenate([[3, 1], np.arange(4, size + 1), [0]])  # our id of each of theirs
    start = ours_of[tar]
    start[:, 0] = 2
    ours = np.asarray(model((ours_of[inp].astype("int32"), start.astype("int32"))))[..., ours_of]
    difference = np.abs(ours - theirs)[..., :-1].max()  # padding, the last, is never emitted, and here has no share
    print(f"{name}: logits up to {np.abs(theirs).max():.1f}, largest difference {difference:.1e}")
    if difference > 1e-4:
        sys.exit("too large")
    return {"inp": inp, "tar": tar, "logits": theirs}


def compare_texts(texts: list[str], theirs: list[str], ours: list[str], name: str) -> None:
    same = sum(one == other for one, other in zip(theirs, ours, strict=True))
    print(f"{name}: {same} of {len(theirs)} translations the same, {len(set(theirs))} different ones among them")
    if same < len(theirs):
        for text, one, other in zip(texts, theirs, ours, strict=True):
            if one != other:
                print(f"  {text!r}\n  there {one!r}\n  here  {other!r}")
        sys.exit("they must all be")


def main(
    fixture: Annotated[Path | None, typer.Option(help="Keep the fitted model in this folder.")] = None,
    steps: Annotated[int, typer.Option(help="Updates of the fitted model.")] = 500,
) -> None:
    from keras_transformer import Translator
    from keras_transformer.marian import export_marian, import_marian

    pairs = sentences()
    train, test = pairs[:-191], [source for source, _ in pairs[-191:]] + ODD
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "fitted"
        folder.mkdir()
        tokenizer = write_tokenizer(folder, train)
        model = new_model(len(tokenizer.encoder), 2, 32, 4, 64)
        fit(model, tokenizer, train, steps)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        theirs = translate(folder, test)
        run, again = Path(temporary) / "run", Path(temporary) / "again"
        import_marian(folder, run)
        fitted = compare_logits(folder, run, "fitted, imported")
        compare_texts(test, theirs, Translator.load(run).translate(test), "fitted, imported")
        export_marian(run, again)
        compare_logits(again, run, "fitted, exported again")
        compare_texts(test, theirs, translate(again, test), "fitted, exported again")
        if fixture:
            shutil.copytree(folder, fixture, dirs_exist_ok=True)
            np.savez_compressed(fixture / "logits.npz", **fitted)
            (fixture / "expected.json").write_text(
                json.dumps(dict(zip(test, theirs, strict=True)), ensure_ascii=False, indent=0) + "\n", encoding="utf-8"
            )
        large = Path(temporary) / "large"
        shutil.copytree(folder, large)
        vocabulary = json.loads((large / "vocab.json").read_text(encoding="utf-8"))
        pieces = [*list(vocabulary)[:-1], *(f"▁{i}" for i in range(60_000 - len(vocabulary))), "<pad>"]
        (large / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}), encoding="utf-8")
        new_model(len(pieces), 6, 512, 8, 2048).save_pretrained(large)
        large_run, large_again = Path(temporary) / "large_run", Path(temporary) / "large_again"
        import_marian(large, large_run)
        compare_logits(large, large_run, "OPUS-MT's shape, imported")
        export_marian(large_run, large_again)
        compare_logits(large_again, large_run, "OPUS-MT's shape, exported")


if __name__ == "__main__":
    typer.run(main)

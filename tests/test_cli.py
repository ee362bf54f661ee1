"""The command as a person meets it: lines in, lines out, one line for a mistake, an exit code that says which."""

import importlib.metadata
import io
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sacrebleu

from keras_transformer import cli
from keras_transformer.config import load_settings
from keras_transformer.export.ctranslate2 import export_ctranslate2
from keras_transformer.export.saved_model import export_saved_model
from keras_transformer.files import read_lines
from keras_transformer.ids import PAD, START
from keras_transformer.runs import load_run, make_model, save_run

COMMAND = Path(sys.executable).with_name("keras-transformer")
SETTINGS = """
model: {num_layers: 1, d_model: 16, num_heads: 2, dff: 32, pe_input: 30, pe_target: 30}
data: {train: [de.txt, en.txt], dev: [de.txt, en.txt], target_language: en, vocab_size: 60}
training: {max_steps: 4, tokens_per_batch: 100, evaluate_every: 2, checkpoint_every: 2}
"""
GERMAN = ["Ein Hund läuft.", "Zwei Hunde laufen.", "Eine Katze schläft.", "Die Katze sieht den Hund."]
ENGLISH = ["A dog runs.", "Two dogs run.", "A cat sleeps.", "The cat sees the dog."]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder with two texts and settings for them."""
    monkeypatch.chdir(tmp_path)
    Path("de.txt").write_text("\n".join(GERMAN) + "\n", encoding="utf-8")
    Path("en.txt").write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    Path("small.yaml").write_text(SETTINGS, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four updates: it has learnt nothing, but it translates."""
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("de.txt").write_text("\n".join(GERMAN) + "\n", encoding="utf-8")
        Path("en.txt").write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
        Path("small.yaml").write_text(SETTINGS, encoding="utf-8")
        sys.argv[:], argv = ["keras-transformer", "train", "small.yaml"], list(sys.argv)
        try:
            cli.app(standalone_mode=False)
        finally:
            sys.argv[:] = argv
    finally:
        os.chdir(before)
    return folder / "runs" / "small"


@pytest.fixture(scope="module")
def sure_run(run, tmp_path_factory):
    """The run, sure that padding and start are never next, as a trained one is: CTranslate2 gives them no share of the
    probability, and a raw model's is large enough to change what it ranks first."""
    model, tokenizers = load_run(run)
    settings = load_settings(run / "settings.yaml", ["model.output_bias=true"])
    other = make_model(settings.model, tokenizers)
    for variable in other.weights:
        if variable is not other.final_bias:
            [same] = [old for old in model.weights if old.path.split("/")[1:] == variable.path.split("/")[1:]]
            variable.assign(same)
    other.final_bias.assign([-1e4 if i in (PAD, START) else 0.0 for i in range(other.target_vocab_size)])
    folder = tmp_path_factory.mktemp("sure") / "run"
    save_run(folder, settings, tokenizers, other)
    return folder


@pytest.fixture(scope="module", params=["run", "saved_model", "ctranslate2"])
def model(request, run, tmp_path_factory):
    """What `translate` takes: a run, and what is exported of it."""
    if request.param == "run":
        return run
    folder = tmp_path_factory.mktemp("exported") / request.param
    exporter = {"saved_model": export_saved_model, "ctranslate2": export_ctranslate2}[request.param]
    exporter(run, folder)
    return folder


@pytest.fixture
def command(monkeypatch, capfdbinary):
    """Runs the command in this process; gives (exit code, stdout, stderr), the two decoded as UTF-8."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["keras-transformer", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfdbinary.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        sys.stdout.flush()
        out, err = capfdbinary.readouterr()
        return code, out.decode("utf-8"), err.decode("utf-8")

    return call


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


BAD_INPUT = [
    # what is done to the folder, the arguments, the exit code, what the one line says
    (None, ["train", "small.yaml", "--set", "training.maxsteps=3"], 2, ["maxsteps", "did you mean 'max_steps'"]),
    (None, ["train", "small.yaml", "--set", "model.d_model=17"], 2, ["d_model", "17", "multiple"]),
    (None, ["train", "nothing.yaml"], 2, ["nothing.yaml"]),
    (None, ["train", "small.yaml", "--set", "data.train=phrasebook:en-xx"], 2, ["data.train", "xx"]),
    (("en.txt", b"A dog runs.\nTwo dogs run.\n"), ["train", "small.yaml"], 1, ["de.txt has 4", "en.txt has 2"]),
    (("en.txt", None), ["train", "small.yaml"], 1, ["en.txt", "No such file"]),
    (("en.txt", b""), ["train", "small.yaml"], 1, ["en.txt", "empty"]),
    (("en.txt", b"A\nB\nC \xff\nD\n"), ["train", "small.yaml"], 1, ["en.txt, line 3", "not UTF-8", "0xff"]),
    (None, ["translate", "."], 1, ["settings.yaml"]),
    (None, ["evaluate", ".", "de.txt", "en.txt"], 1, ["settings.yaml"]),
    (("en.txt", b"A\nB\nC\n"), ["evaluate", ".", "de.txt", "en.txt"], 1, ["4 lines", "3"]),
    (None, ["export", ".", "out"], 1, ["settings.yaml"]),
    (None, ["export", ".", "out", "--compiled", "--format", "marian"], 2, ["--compiled", "marian"]),
    (None, ["settings", "--preset", "bas"], 2, ["bas", "did you mean 'base'"]),
    (None, ["translate", ".", "--beam-size", "2"], 1, ["settings.yaml"]),
    (None, ["translate", ".", "--set", "model.rate=0.5"], 2, ["decoding.NAME=VALUE", "model.rate"]),
    (None, ["score", ".", "de.txt", "en.txt"], 1, ["settings.yaml"]),
    (None, ["report", "."], 1, ["settings.yaml"]),
    (None, ["average", "nothing"], 1, ["nothing: no run folder", "settings.yaml"]),
    (None, ["average", ".", "--out", "de.txt"], 1, ["de.txt is there already"]),
]


@pytest.mark.parametrize(("change", "arguments", "code", "says"), BAD_INPUT, ids=lambda value: str(value)[:60])
def test_bad_input_gets_one_line_and_writes_nothing(folder, command, change, arguments, code, says):
    """C10, https://github.com/mjpost/sacrebleu/issues/160, among them: 4 lines against 3, no score."""
    if change:
        name, content = change
        Path(name).unlink() if content is None else Path(name).write_bytes(content)
    before = everything(folder)
    got, out, err = command(*arguments)
    assert got == code
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("error: ")
    for words in says:
        assert words in err
    assert everything(folder) == before


def test_a_forbidden_piece_that_the_tokenizer_lacks_is_found_before_training(folder, command):
    before = everything(folder)
    code, _, err = command("train", "small.yaml", "--set", "decoding.forbidden=[zebra]")
    assert code == 2 and err.endswith("error: decoding.forbidden: the target vocabulary has no piece 'zebra'\n")
    assert everything(folder) == before


@pytest.mark.parametrize("content", [b"", b"rubbish", None], ids=["empty", "rubbish", "truncated"])
def test_a_damaged_tokenizer_is_named(folder, command, run, content):
    """D1, https://github.com/OpenNMT/OpenNMT-tf/issues/108: one clear error that names the file."""
    import shutil

    shutil.copytree(run, "copy")
    model = Path("copy/tokenizer/joint.model")
    model.write_bytes(model.read_bytes()[:500] if content is None else content)
    code, out, err = command("translate", "copy", stdin=b"Ein Hund\n")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and "copy/tokenizer/joint.model" in err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:5000], "not a whole zip file"),
        (lambda data: data.replace(b'"class_name"', b'"no_name_at"'), "Bad CRC-32"),
    ],
    ids=["truncated", "another byte"],
)
def test_a_damaged_model_is_named(folder, command, run, damage, message):
    import shutil

    shutil.copytree(run, "copy")
    model = Path("copy/best.keras")
    model.write_bytes(damage(model.read_bytes()))
    code, out, err = command("translate", "copy", stdin=b"Ein Hund\n")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and f"copy/best.keras: damaged ({message}" in err


@pytest.mark.parametrize(("stdin", "lines"), [(b"a\nb\n", 2), (b"a\nb", 2), (b"a\nb\n\n", 3), (b"", 0)])
def test_as_many_lines_out_as_in(command, model, stdin, lines):
    """C1, https://github.com/tensorflow/tensor2tensor/issues/376: a line too many after the last."""
    code, out, err = command("translate", model, stdin=stdin)
    assert code == 0
    assert out.count("\n") == lines


def test_blank_lines_stay_blank(command, model):
    """C2, https://github.com/joeynmt/joeynmt/issues/183."""
    code, out, _ = command("translate", model, stdin=b"Ein Hund\n\n \t\nZwei Hunde\n")
    lines = out.split("\n")
    assert code == 0
    assert lines[1:3] == ["", ""] and lines[0] and lines[3] and lines[4:] == [""]


def test_a_carriage_return_is_text_or_part_of_the_lines_end(command, model):
    """C5, https://github.com/mjpost/sacrebleu/pull/24: "\\n" alone ends a record; CRLF input translates as LF input."""
    assert command("translate", model, stdin=b"a\rb\n")[1].count("\n") == 1
    windows = command("translate", model, stdin=b"Ein Hund\r\nZwei Hunde\r\n")[1]
    assert windows == command("translate", model, stdin=b"Ein Hund\nZwei Hunde\n")[1]


def test_bad_bytes_and_long_lines_are_warned_of_and_keep_their_place(command, model):
    """The second line is not UTF-8, the third has 5,000 words; five lines come out and the exit code is 0.

    C3, https://github.com/marian-nmt/marian-dev/issues/365.
    """
    lines = [b"Ein Hund", b"Ein \xff Hund", b"Hund " * 5000, b"Zwei Hunde", b"Eine Katze"]
    code, out, err = command("translate", model, stdin=b"\n".join(lines))
    assert code == 0 and out.count("\n") == 5
    assert "line 2: not UTF-8" in err and "line 3: " in err and "cut to" in err
    alone = command("translate", model, stdin="Ein \ufffd Hund\n".encode())[1]
    assert out.split("\n")[1] == alone.rstrip("\n")


def test_n_best_with_scores(command, run):
    """C7, https://github.com/OpenNMT/OpenNMT-tf/issues/880: three lines a sentence, every field text or number."""
    arguments = ["--beam-size", "4", "--n-best", "3", "--scores"]
    code, out, _ = command("translate", run, *arguments, stdin=b"Ein Hund\n\nZwei Hunde\n")
    lines = out.split("\n")[:-1]
    assert code == 0 and len(lines) == 9 and "b'" not in out
    fields = [line.split("\t") for line in lines]
    assert all(len(row) == 3 and float(row[0]) >= float(row[1]) for row in fields)
    assert fields[3:6] == [["0.000000", "0.000000", ""]] * 3
    best = command("translate", run, "--beam-size", "4", stdin=b"Ein Hund\n\nZwei Hunde\n")[1]
    assert best.split("\n")[:-1] == [fields[i][2] for i in (0, 3, 6)]


def test_options_of_the_search(command, run):
    """Each reaches the decoder; a wrong one is said by its own name."""

    def lengths(*arguments):
        code, out, err = command("translate", run, *arguments, stdin=b"Ein Hund\nDie Katze\n")
        assert code == 0, err
        return [len(line) for line in out.split("\n")[:-1]]

    shortest = lengths("--set", "decoding.max_length=2")
    assert max(shortest) < max(lengths("--set", "decoding.min_length=20"))
    text = command("translate", run, "--prefix", "A dog", "--precision", "bfloat16", stdin=b"Ein Hund\n")[1]
    assert text.startswith("A dog")
    both = command(
        "translate", run, "--set", "decoding.beam_size=1", "--beam-size", "3", "--n-best", "3", stdin=b"Hund\n"
    )
    assert both[0] == 0 and both[1].count("\n") == 3  # an option is stronger than --set
    for arguments, words in [
        (["--beam-size", "0"], ["--set decoding.beam_size=0", "greater than or equal to 1"]),
        (["--n-best", "9"], ["n_best must be at most beam_size, got 9 and 4"]),
        (["--set", "decoding.max_length=3", "--set", "decoding.min_length=4"], ["at most max_length, got 4 and 3"]),
        (["--precision", "int4"], ["float32", "bfloat16", "int4"]),
        (["--set", "decoding.beam=3"], ["'decoding.beam'", "did you mean 'beam_size'"]),
        (["--set", "decoding.forbidden=[xyz]"], ["no piece 'xyz'"]),
    ]:
        code, out, err = command("translate", run, *arguments, stdin=b"Ein Hund\n")
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert all(word in err for word in words)


def test_score_by_line_by_piece_and_of_the_whole(command, run, folder):
    """A line's log-probability is the sum of its pieces', the whole's is the sum of the lines'."""
    from keras_transformer.translator import Translator

    code, out, err = command("score", run, "de.txt", "en.txt")
    assert code == 0
    total, pieces = 0.0, 0
    expected = Translator.load(run).score(zip(GERMAN, ENGLISH, strict=True))
    for line, scored in zip(out.split("\n")[:-1], expected, strict=True):
        log_prob, fields = line.split("\t")
        by_piece = [field.rpartition("=") for field in fields.split(" ")]
        assert [piece for piece, _, _ in by_piece] == [piece for piece, _ in scored]
        assert abs(float(log_prob) - sum(log_prob for _, log_prob in scored)) < 1e-4
        assert abs(float(log_prob) - sum(float(number) for _, _, number in by_piece)) < 1e-4
        total, pieces = total + float(log_prob), pieces + len(by_piece)
    [last] = [line for line in err.split("\n") if "perplexity" in line]
    numbers = re.fullmatch(r"(\d+) pieces, log-probability (.*), perplexity (.*)", last).groups()
    assert int(numbers[0]) == pieces
    assert abs(float(numbers[1]) - total) < 1e-3
    assert abs(float(numbers[2]) - math.exp(-total / pieces)) < 1e-3


def test_pipes_are_read_once(command, run, folder):
    """As /dev/stdin or <(zcat a.gz) are: every line comes out, and two pipes of different lengths are found out."""
    os.mkfifo("pipe")

    def through_pipe(*arguments):
        writer = subprocess.Popen([sys.executable, "-c", "open('pipe', 'wb').write(open('de.txt', 'rb').read())"])
        result = command(*arguments)
        writer.wait(timeout=60)
        return result

    assert through_pipe("translate", run, "pipe")[1] == command("translate", run, "de.txt")[1]
    assert through_pipe("score", run, "pipe", "en.txt")[1] == command("score", run, "de.txt", "en.txt")[1]
    Path("two.txt").write_text("A dog runs.\nTwo dogs run.\n", encoding="utf-8")
    code, _, err = through_pipe("score", run, "pipe", "two.txt")
    assert code == 1 and "two.txt ends at line 2, the other file goes on" in err


def test_a_full_disk_is_one_line(run, folder):
    with open("/dev/full", "wb") as full:
        result = subprocess.run([COMMAND, "translate", run, "de.txt"], stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 1
    assert result.stderr == b"error: output: No space left on device\n"


def test_score_refuses_files_of_two_lengths(command, run, folder):
    Path("two.txt").write_text("A dog runs.\nTwo dogs run.\n", encoding="utf-8")
    code, out, err = command("score", run, "de.txt", "two.txt")
    assert (code, out) == (1, "") and "de.txt has 4 lines, two.txt has 2" in err


def test_ctrl_c_leaves_whole_lines(run, folder):
    """Interrupted in the middle of a long text: what is there is the beginning of the whole, in whole lines."""
    import signal

    text = "Ein Hund läuft.\n" * 60000
    Path("long.txt").write_text(text, encoding="utf-8")
    with open("out.txt", "wb") as out:
        process = subprocess.Popen([COMMAND, "translate", run, "long.txt"], stdout=out, stderr=subprocess.PIPE)
        while not Path("out.txt").stat().st_size and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    written = Path("out.txt").read_bytes()
    lines = written.split(b"\n")
    assert 0 < len(lines) - 1 < 60000 and lines[-1] == b""
    assert len(set(lines[:-1])) == 1
    assert err.decode() == f"stopped; the first {len(lines) - 1} lines are written\n"


def test_a_pipe_that_stays_open_is_answered_line_by_line(run, folder):
    """With --window 1, each line comes back before the next is written."""
    arguments = [COMMAND, "translate", run, "--window", "1"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for text in (b"Ein Hund\n", b"\n", b"Die Katze\n"):
            process.stdin.write(text)
            process.stdin.flush()
            assert (process.stdout.readline() == b"\n") == (text == b"\n")


def test_evaluate_scores_what_translate_writes(command, run, folder):
    """C8, https://github.com/tensorflow/tensor2tensor/issues/587: sacreBLEU on the detokenised output, to 0.01."""
    hypotheses = command("translate", run, "de.txt")[1].split("\n")[:-1]
    code, out, _ = command("evaluate", run, "de.txt", "en.txt")
    bleu = sacrebleu.corpus_bleu(hypotheses, [ENGLISH])
    chrf = sacrebleu.corpus_chrf(hypotheses, [ENGLISH])
    assert code == 0
    assert f"BLEU {bleu.score:.2f} " in out and "tok:13a" in out and "case:mixed" in out
    assert f"chrF2 {chrf.score:.2f} " in out


def test_evaluating_windows_files_gives_the_same_score(command, run, folder):
    """C5, https://github.com/mjpost/sacrebleu/pull/24, in references."""
    unix = command("evaluate", run, "de.txt", "en.txt")[1]
    for name in ("de.txt", "en.txt"):
        Path(name).write_bytes(Path(name).read_bytes().replace(b"\n", b"\r\n"))
    assert command("evaluate", run, "de.txt", "en.txt")[1] == unix


@pytest.mark.parametrize("kind", ["saved_model", "ctranslate2"])
def test_the_export_translates_as_the_run(command, sure_run, folder, kind):
    """S6, https://github.com/OpenNMT/OpenNMT-tf/issues/501: blank, long and odd lines included.

    C6, https://github.com/OpenNMT/OpenNMT-tf/issues/126: UTF-8 under a locale that is not.
    C7, https://github.com/OpenNMT/OpenNMT-tf/issues/880: fields of n-best lists are text and numbers.
    """
    run, text = sure_run, "\n".join([*GERMAN, "", " \t", "Hund " * 50, "Ein\u00a0Hund", "x"]).encode()
    search = ["--beam-size", "3", "--length-penalty", "0", "--set", "decoding.n_best=2"]
    assert command("export", run, "out", "--format", kind, *search)[0] == 0
    lines = [
        [line.split("\t") for line in command("translate", folder, "--scores", *more, stdin=text)[1].split("\n")[:-1]]
        for folder, more in (("out", []), (run, search))
    ]
    assert len(lines[0]) == 2 * 9 and all(len(line) == 3 for line in lines[0])
    assert [line[2] for line in lines[0]] == [line[2] for line in lines[1]]
    for one, other in zip(*lines, strict=True):
        assert math.isclose(float(one[0]), float(other[0]), abs_tol=1e-3)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    piped = subprocess.run([COMMAND, "translate", "out", "--scores"], input=text, env=environment, capture_output=True)
    assert piped.returncode == 0 and "Traceback" not in piped.stderr.decode()
    assert [line.split("\t")[2] for line in piped.stdout.decode("utf-8").split("\n")[:-1]] == [x[2] for x in lines[0]]
    assert command("evaluate", "out", "de.txt", "en.txt")[0] == 0
    code, _, err = command("export", run, "out")
    assert code == 1 and "out is there already" in err
    code, _, err = command("export", "out", "again")
    assert code == 1 and "out is an export already" in err


def test_a_marian_model_goes_there_and_back(command, run, folder):
    """The small run's model, and one in a folder that holds none."""
    assert command("export", run, "marian", "--format", "marian")[0] == 0
    code, out, err = command("import-marian", "marian", "again", "--target-language", "en")
    assert (code, out, err.splitlines()[-1]) == (0, "", "wrote again")
    assert command("translate", "again", stdin=b"Ein Hund\n")[1] == command("translate", run, stdin=b"Ein Hund\n")[1]
    code, _, err = command("import-marian", "marian", "again")
    assert code == 1 and err == "error: again is there already\n"
    code, _, err = command("import-marian", ".", "nothing")
    assert code == 1 and err == "error: .: no Marian model (it has no config.json)\n" and not Path("nothing").exists()
    code, _, err = command("translate", "marian", "de.txt")
    assert code == 1 and err == "error: marian: a Marian model; `keras-transformer import-marian` makes a run of it\n"


def test_the_mean_is_taken_in_place_of_the_run(command, run, folder):
    """Of one checkpoint, it translates as that did; a run that was killed before its first measure has one too."""
    import shutil

    shutil.copytree(run, "copy")
    Path("copy/best.keras").unlink()
    code, out, err = command("average", "copy", "--last", "1")
    assert (code, out) == (0, "") and "wrote copy/average: the mean of 1, step-00000004 to step-00000004" in err
    translations = command("translate", "copy/average", "de.txt")[1]
    assert translations.count("\n") == 4
    assert command("evaluate", "copy/average", "de.txt", "en.txt")[0] == 0
    assert command("export", "copy/average", "exported")[0] == 0
    assert command("translate", "exported", "de.txt")[1] == translations
    code, _, err = command("average", "copy")
    assert code == 1 and "copy/average is there already" in err
    assert command("average", "copy", "--out", "all")[0] == 0 and Path("all/best.keras").exists()


def test_report_does_not_load_tensorflow(run, folder):
    """It answers in a second or two, then; -X importtime lists every module that was loaded."""
    arguments = [sys.executable, "-X", "importtime", COMMAND, "report", run, "--out", "out"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert result.stdout == "" and result.stderr.endswith("wrote out/report.md and report.png\n")
    assert {path.name for path in Path("out").iterdir()} == {"report.md", "report.png"}
    loaded = re.findall(r"\| +(\S+)$", result.stderr, re.MULTILINE)
    assert "matplotlib" in loaded and "tensorflow" not in loaded and "keras" not in loaded


def test_settings_are_yaml_that_train_takes(command, folder):
    from keras_transformer.config import load_settings, preset

    code, out, err = command("settings", "--preset", "base")
    Path("base.yaml").write_text(out, encoding="utf-8")
    assert (code, err) == (0, "")
    assert load_settings("base.yaml") == preset("base")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["frobnicate"], ["train", "--set", "a.b=1"]])
def test_help_and_usage_errors_do_not_load_tensorflow(arguments, folder):
    """Loading it takes seconds; -X importtime lists every module that was."""
    result = subprocess.run([sys.executable, "-X", "importtime", COMMAND, *arguments], capture_output=True, text=True)
    assert result.returncode == (0 if "--help" in arguments else 2)
    assert "typer" in result.stderr
    for module in ("tensorflow", "keras", "numpy", "sentencepiece", "babel"):
        assert f"| {module}\n" not in result.stderr.replace("|   ", "| ").replace("  ", "")


def test_version():
    result = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, encoding="utf-8")
    assert (result.stdout, result.stderr) == (importlib.metadata.version("keras-transformer-mt") + "\n", "")


def test_the_locale_does_not_matter(run, folder):
    """C6, https://github.com/OpenNMT/OpenNMT-tf/issues/126, and D3, https://github.com/OpenNMT/OpenNMT-tf/issues/886.

    Under an ASCII locale, through a pipe: valid UTF-8 on stdout alone, and the run trained there is the same.
    """
    text = "Die Straße läuft. Привет 中文 Ação\n".encode()
    ascii_locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    utf8_locale = {**os.environ, "LC_ALL": "C.UTF-8"}
    outputs = [
        subprocess.run([COMMAND, "translate", run], input=text, capture_output=True, env=env, check=True)
        for env in (ascii_locale, utf8_locale)
    ]
    assert outputs[0].stdout == outputs[1].stdout
    assert outputs[0].stdout.decode("utf-8").count("\n") == 1
    assert outputs[0].stderr == b""
    subprocess.run([COMMAND, "train", "small.yaml"], env=ascii_locale, check=True, capture_output=True)
    for name in ("settings.yaml", "tokenizer/joint.model"):
        assert Path("runs/small", name).read_bytes() == (run / name).read_bytes()


@pytest.mark.parametrize("arguments", [["small.yaml"], ["--run-dir", "runs/small"], ["runs/small/settings.yaml"]])
def test_the_whole_run_again_says_that_nothing_is_left(run, command, monkeypatch, arguments):
    """T3, https://github.com/keras-team/keras/issues/20712: by its settings, its folder, or the settings in it."""
    monkeypatch.chdir(run.parent.parent)
    code, _, err = command("train", *arguments)
    assert code == 0 and "nothing left to do" in err
    assert not Path("runs/settings").exists()
    assert list(read_lines(run / "settings.yaml"))


def test_scripts_are_the_same_command(folder):
    script = Path(__file__).parents[1] / "scripts" / "train.py"
    begin = time.perf_counter()
    result = subprocess.run([sys.executable, script, "nothing.yaml"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: nothing.yaml") and time.perf_counter() - begin < 60

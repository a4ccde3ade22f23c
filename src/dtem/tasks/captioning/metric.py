"""BLEU, METEOR, ROUGE-L, CIDEr and SPICE, as the COCO caption evaluation computes them: by its package, pycocoevalcap.

Every score rests on the PTB tokenizer, which is a Java program, as METEOR and SPICE are; SPICE also needs Stanford
CoreNLP, which that package fetches once. Where something is missing, a score is a text that says what (``needs Java``)
instead of a number: a score on words cut by another tokenizer could be compared with nothing.
"""

import contextlib
import functools
import importlib.util
import io
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtem.errors import DtemError, require

NAMES = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
NO_JAVA = "needs Java"
NO_CORENLP = "needs Stanford CoreNLP"
CORENLP = "stanford-corenlp-3.6.0.jar"
HELP = {
    NO_JAVA: "install a Java runtime (Debian: apt install default-jre-headless), so that `java -version` answers",
    NO_CORENLP: "run once, with network: python -c 'from pycocoevalcap.spice.get_stanford_models import "
    "get_stanford_models as get; get()'",
}
Score = float | str


@dataclass(frozen=True)
class Scores:
    """Metrics of generated captions."""

    corpus: dict[str, Score]
    """By metric, times 100, or a text that says what is missing to compute it."""
    each: dict[str, list[float]]
    """By metric, the score of every image, times 100, in the order of `images`; none for BLEU, a corpus metric."""
    images: list[str]


def check() -> dict[str, str]:
    """What is missing, by metric, so that it is known before hours of work."""
    require("pycocoevalcap", "captioning")
    java = shutil.which("java")
    if java is None or not _runs(java):
        return dict.fromkeys(NAMES, NO_JAVA)
    package = importlib.util.find_spec("pycocoevalcap")
    folders = (package.submodule_search_locations if package else None) or ()
    has_corenlp = any(Path(folder, "spice", "lib", CORENLP).is_file() for folder in folders)
    return {} if has_corenlp else {"SPICE": NO_CORENLP}


@functools.cache
def _runs(java: str) -> bool:
    """Whether it runs: some systems have a `java` that only says how to get one."""
    try:
        return subprocess.run([java, "-version"], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def score(candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> Scores:
    """Score one caption per image against its reference captions.

    Args:
        candidates: caption by image.
        references: captions by image, of the same images.
    """
    if candidates.keys() != references.keys() or not candidates:
        odd = sorted(candidates.keys() ^ references.keys())
        raise DtemError(f"captions and references must be of the same images, one or more; in one only: {odd[:1]}")
    missing = check()
    images = list(candidates)
    corpus: dict[str, Score] = {name: missing.get(name, 0.0) for name in NAMES}
    each: dict[str, list[float]] = {}
    if missing.get("METEOR"):
        return Scores(corpus, each, images)
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints as it goes
        hypotheses = _tokenized({name: [candidates[name]] for name in images})
        truths = _tokenized({name: list(references[name]) for name in images})
        for names, scorer in _scorers(missing):
            total, parts = scorer.compute_score(truths, hypotheses)
            _close(scorer)
            totals, lists = (total, None) if isinstance(total, list) else ([total], parts)
            corpus |= {name: 100 * float(value) for name, value in zip(names, totals, strict=True)}
            if lists is not None:
                each[names[0]] = [100 * _number(part) for part in lists]
    return Scores(corpus, each, images)


def _tokenized(captions: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    try:
        tokenized: dict[str, list[str]] = PTBTokenizer().tokenize(
            {name: [{"caption": text} for text in texts] for name, texts in captions.items()}
        )
    except OSError as error:
        raise DtemError(f"the PTB tokenizer of pycocoevalcap cannot run: {error}") from error
    if any(len(tokenized.get(name, ())) != len(texts) for name, texts in captions.items()):
        raise DtemError("the PTB tokenizer of pycocoevalcap gave back fewer captions than it got: does `java` run?")
    return tokenized


def _scorers(missing: Mapping[str, str]) -> list[tuple[tuple[str, ...], Any]]:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.spice.spice import Spice

    scorers = [(NAMES[:4], Bleu(4)), (("METEOR",), Meteor()), (("ROUGE-L",), Rouge()), (("CIDEr",), Cider())]
    return scorers if "SPICE" in missing else [*scorers, (("SPICE",), Spice())]


def _close(scorer: Any) -> None:
    """METEOR leaves the pipes to its process open."""
    process = getattr(scorer, "meteor_p", None)
    for pipe in () if process is None else (process.stdout, process.stderr):
        pipe.close()


def _number(part: Any) -> float:
    """The score of one image; SPICE gives it with its parts."""
    return float(part["All"]["f"]) if isinstance(part, Mapping) else float(part)

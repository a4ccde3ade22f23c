"""Word-level tokenizer trained on captions, for small captioners that have none of their own."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dtem.errors import DtemError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, BEGIN, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


def build(captions: Iterable[str], least: int = 3) -> "PreTrainedTokenizerFast":
    """A word-level tokenizer over the lower-cased words that occur at least `least` times in `captions`.

    Like GIT's own, it puts ``[CLS]`` before and ``[SEP]`` after a caption.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [PAD, UNKNOWN, BEGIN, END]
    tokenizer.train_from_iterator(captions, trainers.WordLevelTrainer(min_frequency=least, special_tokens=special))
    if tokenizer.get_vocab_size() == len(special):
        raise DtemError(f"no word is in the captions {least} times: give more captions, or a smaller `least`")
    ids = {token: tokenizer.token_to_id(token) for token in (BEGIN, END)}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=list(ids.items())
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=BEGIN,
        sep_token=END,
        bos_token=BEGIN,
        eos_token=END,
    )

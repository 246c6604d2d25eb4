"""The embedded policy's tokenizer, trained on what it will read and write."""

import random

from opengyre.model.tokenizer import EmbeddedTokenizer
from opengyre.tasks.minirepo import conversation as words
from opengyre.tasks.minirepo.family import FUNCTIONS, MODULES, make_package

PACKAGES = 300


def train_tokenizer(vocabulary: int) -> EmbeddedTokenizer:
    """Return the tokenizer, trained on specifications and code; the harness's own sentences are one token each.

    Args:
        vocabulary: Size without words, sentences and specials; the 256 bytes are part of it.
    """
    texts: list[str] = []
    for seed in range(PACKAGES):
        package = make_package(random.Random(seed), held_out=False)
        texts.append(package.instruction())
        texts += ["".join(function.code() for function in functions) for _, functions in package.modules]
        texts += ["all passed", "failed ", "saved"]
    whole = (*words.SENTENCES, *MODULES, *FUNCTIONS, *words.WORDS)
    return EmbeddedTokenizer.train(texts, words=whole, vocabulary=vocabulary)

"""The embedded policy's tokenizer: byte-level BPE without special tokens, so that no text can ever become one.

Special ids stand behind the vocabulary and are only written by the renderer.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from opengyre.core.errors import FileError
from opengyre.core.types import Int32Array

SPECIALS = ("<pad>", "<sys>", "<user>", "<asst>", "<tool>", "<end>", "<arg>")


class EmbeddedTokenizer:
    """Text to ids and back, plus the ids of the special marks.

    Args:
        tokenizer: Byte-level BPE without special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._base = tokenizer.get_vocab_size()
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def train(cls, texts: Iterable[str], *, words: Sequence[str], vocabulary: int) -> "EmbeddedTokenizer":
        """Train on texts.

        Args:
            texts: What the policy will read and write.
            words: Always one token each: names that have to be copied, tool names, status words.
            vocabulary: Size without words and specials; the 256 bytes are part of it.

        Choice: list and comment marks are tokens of their own, so that a phrase of a specification and the comment that
        repeats it have the same tokens: a small fresh model learns to copy, not to translate.
        """
        tokenizer = Tokenizer(models.BPE(unk_token=None))
        pattern = r"\n|    # |- |[0-9]|, then |, |: |\b(?:" + "|".join(words) + r")\b"
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[],
            show_progress=False,
            max_token_length=40,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in words])
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> "EmbeddedTokenizer":
        """Read a tokenizer file.

        Raises:
            FileError: The file is missing or not a tokenizer.
        """
        try:
            return cls(Tokenizer.from_str(path.read_text()))
        except Exception as error:
            raise FileError(f"{path}: not a tokenizer file: {error}") from error

    def save(self, path: Path) -> None:
        """Write the tokenizer file."""
        path.write_text(self._tokenizer.to_str())

    @property
    def vocab_size(self) -> int:
        """All ids, specials included."""
        return self._base + len(SPECIALS)

    def special(self, mark: str) -> int:
        """Return the id of a special mark such as ``<end>``."""
        return self._base + SPECIALS.index(mark)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; no text gives a special id."""
        ids = self._cache.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) > 20_000:
                self._cache.clear()
            self._cache[text] = ids
        return ids

    def decode(self, ids: Sequence[int] | Int32Array) -> str:
        """Return the text of ids; special marks show as their names, invalid bytes as replacement characters."""
        parts: list[str] = []
        plain: list[int] = []
        for token in np.asarray(ids).tolist():
            if token < self._base:
                plain.append(token)
                continue
            parts.append(self._tokenizer.decode(plain, skip_special_tokens=False))
            plain = []
            parts.append(SPECIALS[token - self._base])
        parts.append(self._tokenizer.decode(plain, skip_special_tokens=False))
        return "".join(parts)

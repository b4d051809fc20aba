"""The tokenizer of a fast-slow language model for Hugging Face transformers. Needs sentencepiece and transformers only.

It gives the ids that the model was trained on, for every text, and decode(encode(text)) is the text. Three things
differ from transformers' own sentencepiece tokenizers: the sign U+2581, sentencepiece's own mark for a space, goes
round the model as bytes; long texts are encoded in pieces; and text that looks like an end mark is text.

    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import sentencepiece
from transformers import PreTrainedTokenizer

WORD_MARK = "\u2581"

# A long text is cut after a newline, or else before a space that follows another character: no id depends on it there.
PIECE_CHARACTERS = 1 << 14
LINE_CHARACTERS = 1 << 16
LONGEST_PIECE = 1 << 17
BEFORE_A_SPACE = re.compile(r"[^ ](?= )")


def end_of_piece(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends, the end of the text included."""
    if len(text) - start <= PIECE_CHARACTERS:
        return len(text)
    end = text.find("\n", start + PIECE_CHARACTERS - 1, start + LINE_CHARACTERS) + 1
    if end or len(text) - start < LINE_CHARACTERS:
        return end or len(text)
    space = BEFORE_A_SPACE.search(text, start + LINE_CHARACTERS - 1, start + LONGEST_PIECE)
    return space.end() if space else min(start + LONGEST_PIECE, len(text))


def pieces(text: str) -> Iterator[str]:
    """The pieces that are encoded one by one."""
    start = 0
    while start < len(text):
        end = end_of_piece(text, start)
        yield text[start:end]
        start = end


class FastSlowTokenizer(PreTrainedTokenizer):
    """A sentencepiece model. Tokens are added neither to a text nor to the vocabulary.

    The file has a name of its own, so that nothing takes it for one of transformers' own tokenizers.
    """

    vocab_files_names: ClassVar = {"vocab_file": "sentencepiece.model"}
    model_input_names: ClassVar = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str, **kwargs: Any):
        self.vocab_file = vocab_file
        self.processor = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        piece = self.processor.id_to_piece
        self.mark_ids = [self.processor.piece_to_id(f"<0x{byte:02X}>") for byte in WORD_MARK.encode()]
        marks = {
            "eos_token": piece(self.processor.eos_id()),
            "pad_token": piece(self.processor.pad_id()),
            "unk_token": piece(self.processor.unk_id()),
        }
        super().__init__(**(marks | kwargs))

    @property
    def vocab_size(self) -> int:
        return int(self.processor.vocab_size())

    def get_vocab(self) -> dict[str, int]:
        return {self.processor.id_to_piece(number): number for number in range(self.vocab_size)}

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """The pieces of a text. Nothing in it is taken for a special token, whatever it looks like."""
        return [self.processor.id_to_piece(number) for number in self.ids_of(text)]

    def ids_of(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in pieces(text):
            first, *rest = piece.split(WORD_MARK)
            ids += self.processor.encode(first)
            for part in rest:
                ids += self.mark_ids + self.processor.encode(part)
        return ids

    def _convert_token_to_id(self, token: str) -> int:
        return int(self.processor.piece_to_id(token))

    def _convert_id_to_token(self, index: int) -> str:
        return str(self.processor.id_to_piece(index))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return str(self.processor.decode([self._convert_token_to_id(token) for token in tokens]))

    def _decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of some ids: special ones as their names, or as nothing."""
        ids = [int(token_ids)] if not hasattr(token_ids, "__iter__") else [int(number) for number in token_ids]
        if skip_special_tokens:
            return str(self.processor.decode(ids))
        text, run = "", list[int]()
        for number in ids:
            if self.processor.is_control(number):
                text += self.processor.decode(run) + self.processor.id_to_piece(number)
                run = []
            else:
                run.append(number)
        return text + str(self.processor.decode(run))

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return token_ids_0 + (token_ids_1 or [])

    def _add_tokens(self, new_tokens: Sequence[Any], special_tokens: bool = False) -> int:
        """Raises ValueError for a token that the model does not know: it would never be found in a text."""
        for token in new_tokens:
            if self.processor.piece_to_id(str(token)) == self.processor.unk_id() and str(token) != self.unk_token:
                raise ValueError(f"the token {str(token)!r} cannot be added to this tokenizer")
        return int(super()._add_tokens(new_tokens, special_tokens))

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        target = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}sentencepiece.model"
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)

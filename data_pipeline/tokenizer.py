"""A lossless sentencepiece tokenizer: decode(encode(text)) == text for every text that UTF-8 can carry."""

from __future__ import annotations

import hashlib
import heapq
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import sentencepiece

from data_pipeline.cutting import pieces
from data_pipeline.errors import UserError

ModelType = Literal["bpe", "unigram"]

UNK_ID, BOS_ID, EOS_ID, PAD_ID = 0, 1, 2, 3
MODEL_NAME = "tokenizer.model"

_WORD_MARK = "\u2581"
"""sentencepiece's own sign for a space. Where the text has it, it goes round the model: it would return as a space."""

_UNLEARNABLE = str.maketrans({_WORD_MARK: "\n", "\u2585": "\n", "\0": "\n"})
"""Characters for which the trainer drops the whole line. They are encoded as bytes; the rest of the line is wanted."""

_TRAINING_THREADS = 16
"""Written into the model file: a number that followed the machine would change the model's hash."""

_SAMPLING_KEY = b"tokenizer sample"
"""Apart from the hash that decides a document's split and place in the shuffle."""

_PROBE = " a  b\n\n\tc\r\n \ufeff\u00e9\u0065\u0301 \u4e2d\u6587 \U0001f600\0<s></s><pad> \u2581\u2585\ufffd "


class Tokenizer:
    """Text to ids and back. Ids `eos_id` and `pad_id` never come out of a text."""

    def __init__(self, model: bytes, name: str = MODEL_NAME) -> None:
        """`model`: the content of a sentencepiece model file; `name` is used in messages.

        Raises:
            UserError: not a sentencepiece model, one without <eos>, <pad> or byte pieces, or one that alters text.
        """
        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, ValueError):
            raise UserError(f"tokenizer {name} is not a sentencepiece model") from None
        self.vocab_size: int = self._processor.vocab_size()
        self.eos_id: int = self._processor.eos_id()
        self.pad_id: int = self._processor.pad_id()
        for label, piece_id in (("end-of-document (eos)", self.eos_id), ("padding (pad)", self.pad_id)):
            if piece_id < 0:
                raise UserError(f"tokenizer {name} has no {label} piece; train one with `fastslow data tokenizer`")
        mark_bytes = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _WORD_MARK.encode()]
        self._word_mark_ids = np.array(mark_bytes, dtype=np.int32)
        if self._processor.unk_id() in self._word_mark_ids or self.decode(self.encode(_PROBE)) != _PROBE:
            advice = "train one with `fastslow data tokenizer`"
            raise UserError(f"tokenizer {name} alters text (decode(encode(text)) != text); {advice}")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a model file, or `tokenizer.model` of a folder.

        Raises:
            UserError: no such file, or one that `Tokenizer` refuses.
        """
        file = path / MODEL_NAME if path.is_dir() else path
        try:
            model = file.read_bytes()
        except OSError as error:
            raise UserError(f"tokenizer {file} cannot be read: {error.strerror}") from None
        return cls(model, str(file))

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any end mark.

        Raises:
            UserError: the text holds a lone surrogate.
        """
        return [piece_id for piece in pieces(text) for piece_id in self.encode_piece(piece).tolist()]

    def encode_piece(self, piece: str) -> npt.NDArray[np.int32]:
        """Ids of one of the `pieces` of a text.

        Raises:
            UserError: it holds a lone surrogate.
        """
        if _WORD_MARK not in piece:
            return self._encode(piece)
        parts = [self._encode(piece[: piece.index(_WORD_MARK)])]
        for part in piece.split(_WORD_MARK)[1:]:
            parts += self._word_mark_ids, self._encode(part)
        return np.concatenate(parts)

    def _encode(self, text: str) -> npt.NDArray[np.int32]:
        try:
            ids: npt.NDArray[np.int32] = self._processor.encode_as_numpy(text)
        except (RuntimeError, UnicodeEncodeError):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise UserError("the text holds a lone surrogate, which no tokenizer can encode") from None
            raise
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; control ids (eos, pad) have none, broken byte sequences become U+FFFD."""
        return self._processor.decode([int(piece_id) for piece_id in ids])

    def piece_sizes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of text that each id stands for, [vocab_size]; control ids (eos, pad) stand for none.

        The sizes of the ids of a text add up to the text's, wherever its ids are cut apart.
        """
        return np.array([self._piece_size(piece_id) for piece_id in range(self.vocab_size)], dtype=np.int64)

    def _piece_size(self, piece_id: int) -> int:
        if self._processor.is_control(piece_id) or self._processor.is_unknown(piece_id):
            return 0
        if self._processor.is_byte(piece_id):
            return 1
        return len(self._processor.id_to_piece(piece_id).replace(_WORD_MARK, " ").encode())


def sample_texts(texts: Iterable[str], count: int) -> list[str]:
    """`count` of the texts, or all if there are fewer: those whose hashes are the smallest, in the order of the hashes.

    Only the chosen ones are held. The order in which the texts come does not matter.
    """
    chosen: list[tuple[int, str]] = []  # a heap whose first entry has the largest hash: the hashes are negated
    for text in texts:
        digest = hashlib.blake2b(text.encode("utf-8"), digest_size=16, key=_SAMPLING_KEY).digest()
        entry = (-int.from_bytes(digest), text)
        if len(chosen) < count:
            heapq.heappush(chosen, entry)
        elif entry[0] > chosen[0][0]:
            heapq.heapreplace(chosen, entry)
    return [text for _, text in sorted(chosen, key=lambda entry: -entry[0])]


@dataclass(frozen=True)
class TrainingReport:
    """What the training saw."""

    num_documents: int
    num_bytes: int
    num_skipped_lines: int
    num_skipped_bytes: int


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    model_type: ModelType = "bpe",
    max_line_bytes: int = 1 << 14,
) -> tuple[Tokenizer, TrainingReport]:
    """Train on whole documents. The same texts in the same order give the same bytes.

    Lines longer than `max_line_bytes` are left out of the training, and counted; they can be encoded all the same.

    Raises:
        UserError: no usable line, or a vocabulary larger or smaller than the texts allow. What `texts` raises passes.
    """
    lines = _TrainingLines(texts, max_line_bytes)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            max_sentence_length=max_line_bytes,
            num_threads=_TRAINING_THREADS,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=PAD_ID,
            minloglevel=2,
        )
    except (RuntimeError, SystemError) as error:
        if lines.failure is not None:
            raise lines.failure from None
        raise UserError(_reason(str(error), vocab_size, lines.report)) from None
    if lines.failure is not None:
        raise lines.failure
    return Tokenizer(model.getvalue()), lines.report


class _TrainingLines:
    """The lines of the texts, and what was counted on the way.

    The C++ trainer turns an exception of its iterator into one of its own, so the original is kept in `failure`.
    """

    def __init__(self, texts: Iterable[str], max_line_bytes: int) -> None:
        self._texts, self._max_line_bytes = texts, max_line_bytes
        self.failure: BaseException | None = None
        self.report = TrainingReport(0, 0, 0, 0)

    def __iter__(self) -> Iterator[str]:
        documents = total = skipped_lines = skipped_bytes = 0
        try:
            for text in self._texts:
                document_bytes = len(text.encode("utf-8"))
                documents, total = documents + 1, total + document_bytes
                for line in text.translate(_UNLEARNABLE).split("\n"):
                    num_bytes = len(line.encode("utf-8"))
                    if num_bytes > self._max_line_bytes:
                        skipped_lines, skipped_bytes = skipped_lines + 1, skipped_bytes + num_bytes
                    elif line:
                        yield line
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.report = TrainingReport(documents, total, skipped_lines, skipped_bytes)


def _reason(message: str, vocab_size: int, report: TrainingReport) -> str:
    """sentencepiece's complaint in the words of the command line."""
    if match := re.search(r"too high \(\d+\).*<= (\d+)", message):
        return f"--vocab-size {vocab_size} is larger than the text supports: at most {match[1]}"
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return f"--vocab-size {vocab_size} is too small: this text needs at least {match[1]}"
    if "sentences_.empty()" in message:
        skipped = f" ({report.num_skipped_lines} lines are longer than the limit)" if report.num_skipped_lines else ""
        return f"the corpus has no line to train a tokenizer on{skipped}"
    return f"sentencepiece cannot train the tokenizer: {' '.join(message.split())}"

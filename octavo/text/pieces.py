"""What bytes a token stands for, derived from the decoder of a `tokenizer.json`.

Octavo decodes by joining the bytes of the tokens and reading the result as UTF-8, once at the end or as it
grows; both give the same text by construction. That needs every token to stand for fixed bytes, which holds for
the two families of decoders that language models use: byte-level BPE (each character of a token is one byte,
in GPT-2's alphabet) and SentencePiece (U+2581 is a space, "<0xE2>" one byte, the first space is dropped).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters mean themselves, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
_BYTE_CHARS = {byte: char for char, byte in BYTE_ALPHABET.items()}


@dataclass(frozen=True)
class PieceRule:
    """How the string of a token becomes bytes, and how many leading spaces the whole text loses."""

    byte_level: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    word_separator: str = ""
    """put before each token: a tokenizer without a decoder writes words apart"""
    strip_start: int = 0

    def to_bytes(self, token: str) -> bytes:
        """The bytes that `token` stands for."""
        if self.byte_level:
            codes = [BYTE_ALPHABET.get(char, -1) for char in token]
            # An added token may hold characters outside the alphabet: it is plain text then.
            return token.encode() if -1 in codes else bytes(codes)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replace:
            token = token.replace(old, new)
        return (self.word_separator + token).encode()


    def strings(self, data: bytes) -> list[str]:
        """Token strings that may stand for `data`; `to_bytes` tells whether they do."""
        if self.byte_level:
            return ["".join([_BYTE_CHARS[byte] for byte in data])]
        found = [f"<0x{data[0]:02X}>"] if self.byte_fallback and len(data) == 1 else []
        separator = self.word_separator.encode()
        if data.startswith(separator):
            text = data[len(separator) :].decode("utf-8", "replace")
            for old, new in reversed(self.replace):
                text = text.replace(new, old) if new else text
            found.append(text)
        return found


def piece_rule(decoder: dict[str, Any] | None) -> PieceRule:
    """The rule for the "decoder" entry of a tokenizer.json; ModelError for a kind that has none."""
    if decoder is None:
        return PieceRule(word_separator=" ", strip_start=1)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replace: list[tuple[str, str]] = []
    byte_level, byte_fallback, fused, strip_start = False, False, False, 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replace.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                strip_start = start
            case {"type": "Metaspace", "replacement": old}:
                replace.append((old, " "))
                strip_start = 0 if step.get("prepend_scheme") == "never" else 1
            case _:
                raise ModelError(
                    f"The tokenizer's decoder has the step {step.get('type')!r}, which is not supported.",
                    "Octavo reads byte-level BPE and SentencePiece decoders.",
                )
    return PieceRule(byte_level, tuple(replace), byte_fallback, "", strip_start)

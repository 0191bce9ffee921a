"""`Tokenizer`: text to token ids and back, from a tokenizer.json or from a GGUF file's vocabulary.

Encoding is the `tokenizers` library. Decoding is our own (see `text.pieces`), so that a text decoded at once and
one decoded token by token are the same. Ids beyond the vocabulary, which a padded output layer can produce,
stand for no text.

Control tokens written in a text are recognised by default (`parse_special`), because rendered chat templates
consist of them: text of users inside a template can therefore forge turns, as in most engines.
"""

from __future__ import annotations

import contextlib
import json
import operator
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError, RequestError
from octavo.files import field, read_bytes, read_json, read_text
from octavo.text import gguf_vocab
from octavo.text.pieces import piece_rule

_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_ID = 1 << 32


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads.

    `bos_id` and `eos_id` are None when the model has none. `eos_ids` are all ids that end a generation.
    `chat_template` is None when the model has none. `special_ids` are hidden by `skip_special_tokens`.
    `strip_start` is the number of spaces that the start of a decoded text loses (SentencePiece).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool = False,
    ) -> None:
        """`add_bos` None leaves the special tokens of `encode` to the tokenizer.json's post-processor."""
        backend.no_truncation()
        backend.no_padding()
        self.bos_id = bos_id
        self.eos_id = eos_ids[0] if eos_ids else None
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size()
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._backend = backend
        self._literal: Backend | None = None
        self._lock = threading.Lock()
        self._by_post_processor = add_bos is None and not add_eos
        self._prefix = [bos_id] if add_bos and bos_id is not None else []
        self._suffix = [eos_ids[0]] if add_eos and eos_ids else []
        decoder = backend.decoder
        self._rule = piece_rule(None if decoder is None else json.loads(decoder.__getstate__()))
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.strip_start = self._rule.strip_start

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json and their companions in a model folder."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(
                f"{folder} has no tokenizer.json.",
                "Save the model's fast tokenizer there; a SentencePiece tokenizer.model alone is not supported.",
            )
        try:
            backend = Backend.from_buffer(read_bytes(path, _MAX_TOKENIZER_BYTES))
        except ModelError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ModelError(f"{path} is no valid tokenizer ({error}).", "Download the file again.") from None
        config = _optional_json(folder / "tokenizer_config.json")
        special = _optional_json(folder / "special_tokens_map.json") | config
        bos = _special_id(backend, special, "bos_token")
        eos = _special_id(backend, special, "eos_token")
        add_bos, add_eos = (field(config, f"add_{kind}_token", bool, None) for kind in ("bos", "eos"))
        return cls(
            backend,
            bos_id=bos,
            eos_ids=tuple(dict.fromkeys([*([] if eos is None else [eos]), *generation_eos_ids(folder)])),
            chat_template=_chat_template(folder, config),
            add_bos=add_bos,
            add_eos=bool(add_eos),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file; ModelError naming the kind when it is not supported."""
        backend = gguf_vocab.build(metadata)
        size = backend.get_vocab_size()
        ids: dict[str, int] = {}
        for name in ("bos", "eos", "eot", "eom"):
            value = field(metadata, f"tokenizer.ggml.{name}_token_id", int, None)
            if value is not None and not 0 <= value < size:
                raise ModelError(f"The file's {name} token id {value} is outside its vocabulary of {size}.")
            if value is not None:
                ids[name] = value
        pre = field(metadata, "tokenizer.ggml.pre", str, "default")
        begins = pre == "llama-bpe" or metadata.get("tokenizer.ggml.model") == "llama"
        return cls(
            backend,
            bos_id=ids.get("bos"),
            eos_ids=tuple(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids)),
            chat_template=field(metadata, "tokenizer.chat_template", str, None),
            add_bos=field(metadata, "tokenizer.ggml.add_bos_token", bool, begins),
            add_eos=field(metadata, "tokenizer.ggml.add_eos_token", bool, False),
        )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, from which `from_folder` makes the same tokenizer."""
        (folder / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": self.chat_template}
        config |= {"bos_token": self.bos_token or None, "eos_token": self.eos_token or None}
        config |= {"add_bos_token": bool(self._prefix), "add_eos_token": bool(self._suffix)}
        known = {key: value for key, value in config.items() if value is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(known, indent=2), encoding="utf-8")

    @property
    def bos_token(self) -> str:
        """The string of `bos_id`, or ""."""
        return "" if self.bos_id is None else self.id_to_token(self.bos_id)

    @property
    def eos_token(self) -> str:
        """The string of `eos_id`, or ""."""
        return "" if self.eos_id is None else self.id_to_token(self.eos_id)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what the model wants around a plain text; a rendered chat template has it
        already. With `parse_special` False, control tokens written in `text` are ordinary characters.
        RequestError when `text` holds lone surrogates.
        """
        backend = self._backend if parse_special else self._literal_backend()
        try:
            native = add_special_tokens and self._by_post_processor
            ids = backend.encode(text, add_special_tokens=native).ids
        except TypeError:
            raise RequestError("The text is not valid Unicode (lone surrogates).", "Send UTF-8 text.") from None
        if add_special_tokens and not native:
            return [*self._prefix, *ids, *self._suffix]
        return list(ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, after_prompt: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        `after_prompt`: the ids continue a text, so a leading space of the first token is kept.
        """
        hidden = self.special_ids if skip_special_tokens else ()
        data = b"".join([self.token_bytes(index) for index in ids if index not in hidden])
        text = data.decode("utf-8", "replace")
        if self.strip_start and not after_prompt:
            return text[leading_spaces(text, self.strip_start) :]
        return text

    def token_bytes(self, index: int) -> bytes:
        """The bytes that one token adds to a text; empty for an id beyond the vocabulary."""
        found = self._bytes.get(index)
        if found is None:
            token = self.id_to_token(index)
            found = self._rule.to_bytes(token)
            if token:  # ids beyond the vocabulary are not kept: there is no end of them
                self._bytes[index] = found
        return found

    def token_text(self, index: int) -> str | None:
        """The same as text, when these bytes are whole characters by themselves; else None."""
        try:
            return self._texts[index]
        except KeyError:
            pass
        data, text = self.token_bytes(index), None
        with contextlib.suppress(UnicodeDecodeError):
            text = data.decode()
        if index in self._bytes:
            self._texts[index] = text
        return text

    def ids_of_bytes(self, data: bytes) -> list[int]:
        """The tokens that stand for exactly these bytes."""
        ids = [self._backend.token_to_id(string) for string in self._rule.strings(data)]
        return [i for i in ids if i is not None and i not in self.special_ids and self.token_bytes(i) == data]

    def id_to_token(self, index: int) -> str:
        """The vocabulary's string for one id; "" for an id beyond the vocabulary."""
        try:
            number = operator.index(index)
        except TypeError:
            number = -1
        if not 0 <= number < _MAX_ID:
            raise RequestError(f"{index!r} is not a token id.", f"Ids are integers from 0 to {self.vocab_size - 1}.")
        return self._backend.id_to_token(number) or ""

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary string, or None."""
        return self._backend.token_to_id(token)

    def _literal_backend(self) -> Backend:
        """A second tokenizer that reads control tokens as text: the library's switch is not per call."""
        with self._lock:
            if self._literal is None:
                self._literal = Backend.from_str(self._backend.to_str())
                self._literal.encode_special_tokens = True
            return self._literal


def leading_spaces(text: str, limit: int) -> int:
    """How many of the first `limit` characters of `text` are spaces without a gap."""
    return next((i for i, char in enumerate(text[:limit]) if char != " "), min(limit, len(text)))


def generation_eos_ids(folder: Path) -> list[int]:
    """The end-of-sequence ids of generation_config.json, or [] when it names none."""
    value = _optional_json(folder / "generation_config.json").get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    return [index for index in ids if isinstance(index, int) and index >= 0]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_id(backend: Backend, config: dict[str, Any], key: str) -> int | None:
    """The id of a special token that a config gives as a string or as {"content": string}."""
    value = config.get(key)
    token = value.get("content") if isinstance(value, dict) else value
    if not isinstance(token, str):
        return None
    index = backend.token_to_id(token)
    if index is None:
        raise ModelError(f"The tokenizer's {key} {token!r} is not in its vocabulary.", "Check the files.")
    return int(index)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over chat_template.json and over tokenizer_config.json; a list has names."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_text(file, _MAX_TEMPLATE_BYTES)
    value = _optional_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None

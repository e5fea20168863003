"""Turn text into tokens, and tokens that come one by one into text."""

from typing import Any


class ByteTokenizer:
    """Encode a byte as a token, for models with random weights."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(c if c.isprintable() else "." for c in bytes(tokens).decode("latin-1"))

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "


def load_tokenizer(folder: str) -> Any:
    """Return the tokenizer of a checkpoint."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the tokens of a conversation up to where the assistant begins."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


class TextStream:
    """Decode a growing answer; hold text back while a later token or a stop string could change it."""

    def __init__(self, tokenizer: Any, stop: list[str]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self.start = 0  # tokens before it are decoded for good
        self.text = ""  # decoded for good
        self.sent = 0  # characters that were returned
        self.is_stopped = False

    def add(self, tokens: list[int], is_last: bool) -> str:
        """Return the text that is new."""
        if self.is_stopped:
            return ""
        self.tokens += tokens
        # some tokenizers decode a word by its predecessor: keep a few tokens of context
        context = self.tokenizer.decode(self.tokens[max(0, self.start - 4) : self.start], **SKIP)
        tail = self.tokenizer.decode(self.tokens[max(0, self.start - 4) :], **SKIP)[len(context) :]
        # a character of several tokens is not complete yet
        if not tail.endswith("\ufffd") or is_last:
            self.text, self.start = self.text + tail, len(self.tokens)
        ends = [at for at in (self.text.find(s, self.sent) for s in self.stop) if at >= 0]
        end = len(self.text)
        if ends:
            self.is_stopped, end = True, min(ends)
        elif not is_last:
            end -= max((len(s) - 1 for s in self.stop), default=0)
        end = max(end, self.sent)
        new, self.sent = self.text[self.sent : end], end
        return new


SKIP = {"skip_special_tokens": True}

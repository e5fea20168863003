"""Choose the next tokens of a batch, each row with its own temperature, top-p and seed."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Hold how one request draws: temperature 0 is greedy; top_p keeps the likeliest tokens of that mass."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def uniform(self, position: int) -> float:
        """Return the random number in [0, 1) for a position; a token depends on no other request or draft."""
        return random.Random(self.seed * 1_000_003 + position).random()


def sample(logits: Tensor, samplings: list[Sampling], positions: list[int]) -> Tensor:
    """Return the tokens [rows, T] for logits [rows, T, vocabulary]; row r draws for position p_r + t."""
    greedy = logits.argmax(-1)
    if all(s.temperature == 0 for s in samplings):
        return greedy
    (rows, T), device = greedy.shape, logits.device
    temperature = torch.tensor([s.temperature for s in samplings], device=device)[:, None, None]
    top_p = torch.tensor([s.top_p for s in samplings], device=device)[:, None, None]
    u = torch.tensor(
        [[s.uniform(p + t) for t in range(T)] for s, p in zip(samplings, positions, strict=True)],
        device=device,
    )
    probs, order = (logits.float() / temperature.clamp(min=1e-5)).softmax(-1).sort(-1, descending=True)
    before = probs.cumsum(-1) - probs
    # the first token always stays
    probs = probs.masked_fill((before >= top_p) & (before > 0), 0)
    total = probs.cumsum(-1)
    drawn = torch.searchsorted(total, u[..., None] * total[..., -1:], right=True)
    # u times the total may round to the total: the last token with a mass
    drawn = drawn.minimum((probs > 0).sum(-1, keepdim=True) - 1)
    return torch.where(temperature[..., 0] == 0, greedy, order.gather(-1, drawn)[..., 0]).view(rows, T)


class Drafter:
    """Guess tokens by prompt lookup: what followed the last three, two or one tokens when they last came."""

    LONGEST = 3

    def __init__(self, tokens: list[int]) -> None:
        self.text: list[int] = []
        self.follower: dict[tuple[int, ...], int] = {}  # tokens -> the position after their last occurrence
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            end = len(self.text)
            for n in range(1, min(self.LONGEST, end) + 1):
                self.follower[tuple(self.text[end - n :])] = end
            self.text.append(token)

    def packet(self, drafts: int) -> list[int]:
        """Return the last token and `drafts` guesses, zeros where there is none."""
        for n in range(min(self.LONGEST, len(self.text)) if drafts else 0, 0, -1):
            start = self.follower.get(tuple(self.text[-n:]))
            if start is not None:
                guesses = self.text[start : start + drafts]
                return [self.text[-1], *guesses, *[0] * (drafts - len(guesses))]
        return [self.text[-1], *[0] * drafts]

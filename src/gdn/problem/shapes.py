"""Count sequences and chunks, and read the sizes of a call from its tensors."""

from typing import Protocol

from gdn.notation import Offsets, Q, Values

CHUNK = 64  # tokens per chunk, in every backend and in the saved tensors of a forward


class Tokens(Protocol):
    """Describe B x T tokens; with cu_seqlens they are N packed sequences, and B is 1."""

    @property
    def B(self) -> int: ...

    @property
    def T(self) -> int: ...

    @property
    def N(self) -> int: ...

    @property
    def cu_seqlens(self) -> Offsets | None: ...


class Sequences:
    """Count the sequences and chunks of tokens."""

    @property
    def N(self: Tokens) -> int:
        """Return N, the number of sequences; in a decode, of rows."""
        return self.B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def num_chunks(self: Tokens) -> int:
        """Return the number of chunks in all sequences.

        For packed sequences it is the bound sum ceil(T_n / C) <= floor((T + N (C - 1)) / C).
        """
        return count_chunks(self.B, self.T, None if self.cu_seqlens is None else self.N)


def count_chunks(B: int, T: int, N: int | None) -> int:
    """Return the number of chunks of B dense rows (N is None), or its bound for N packed sequences."""
    if N is None:
        return B * ((T + CHUNK - 1) // CHUNK)
    return (T + N * (CHUNK - 1)) // CHUNK


class Shapes(Sequences):
    """Read the sizes of a call of the rule from q [B, T, H, K] and v [B, T, HV, V]."""

    q: Q
    v: Values
    cu_seqlens: Offsets | None

    @property
    def B(self) -> int:
        return self.q.shape[0]

    @property
    def T(self) -> int:
        return self.q.shape[1]

    @property
    def H(self) -> int:
        return self.q.shape[2]

    @property
    def HV(self) -> int:
        return self.v.shape[2]

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]

"""Plain torch on any device: the default on the CPU, and what every other backend must agree with."""

from dataclasses import replace

from gdn.backends.backend import absent
from gdn.backends.eager.recurrent import recurrent_forward
from gdn.backends.eager.rule import chunk_backward, chunk_forward, saves

BACKEND = replace(
    absent("eager", "not written yet"),
    refuses=lambda problem: None,
    saves=saves,
    chunk_forward=chunk_forward,
    chunk_backward=chunk_backward,
    recurrent_forward=recurrent_forward,
)

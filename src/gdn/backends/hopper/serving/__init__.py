"""Decode one token with a history on sm_90, with states in flight from HBM all the time, in Gluon.

`triton.serving.history` has the recurrence, and the kernel of all other problems; the arithmetic, and so the
bits, are the same. There a program is a chain of latencies: slot, cursor, history and state from HBM, then
MMAs that need all of them. Here a CTA takes row and head after row and head (an item), and its warps share
the work on several of them:

    copies    2 warps: copy tokens, histories and states of later items into shared memory (cp.async)
    scores    2 warps, every other item each: gates, <x, k> with the token and the history; append k and G
    outputs   4 warps: [q; k] S by MMA, o and u; fold where the history is full

Files in reading order:

    items     structs, shared memory, mbarriers; which row, head and slot an item has
    copies, scores, outputs, fold
    history   the kernel and its launch
"""

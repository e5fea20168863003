"""Compute A_inv and the factors of each chunk for the state scan. Files in reading order:

kernel      the kernel's entry, `solve_kernel`
tiles       which chunk and head a tile is, and where its tokens are
decays      decays, beta and the factors, from the caller's gates
gram        k k^T in blocks of 16 x 16, and the l2 norms from its diagonal
coupling    L = -A from the blocks of k k^T and the factors
inverse     (I - L)^-1
results     A_inv or B from registers to shared memory
"""

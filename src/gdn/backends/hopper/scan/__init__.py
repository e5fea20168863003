"""The state scan, a persistent, warp-specialised kernel. Files in reading order:

kernel      the kernels' entries: `persistent_scan_kernel`, and `segment_transfer_kernel` without outputs
structs     what the partitions of a CTA share: inputs, outputs, tiles in shared memory, mbarriers
scheduler   work items: where their tokens are, how they are published
producer    the producer warp: takes work items, issues TMA loads
scores      the score warpgroup: computes P
consumer    a consumer warpgroup: loops over work items and chunks with S^T in registers
chunk       one chunk in a consumer warpgroup: the general path and the fast path
operands    register layouts, and the MMAs of a chunk
short       another kernel of the same chunks, for many short sequences: their states move by TMA
swap        how its producer hands work items and states to the other partitions
"""

"""Benchmarks of gdn: problems as data, other libraries beside gdn, each answer checked before it is timed.

Read the folders in this order:

    problems    what is measured: shapes and gates by name, speculation, tensors on the device
    providers   who computes it: gdn, FLA, FlashQLA, FlashKDA, FlashInfer, Transformers, each in its own
                conventions
    timing      CUDA graphs, events, host time, cold start
    passes      one module for each benchmark: the rule, a layer, a model, stages, decode steps, speculation
    judging     errors of many providers beside one another: `verify`
    results     rows, tables, pictures, pages, comparisons of commits
    commands    the command line: `gdn bench`, `gdn verify`, or `python -m gdn_bench`

The package is no part of the wheel. In a clone the command `gdn` finds it; elsewhere add the folder that
contains it to PYTHONPATH.
"""

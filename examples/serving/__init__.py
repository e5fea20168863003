"""Provide the parts of the small serving engine of examples/serve.py.

model.py      Transformers' weights and modules around two mixers that the engine passes in
pool.py       slots for states and windows, pages for keys and values, snapshots of prefixes
request.py    a request, a piece of its prompt, and the sizes of an engine
engine.py     continuous batching: chunked prefill beside decoding, drafts, CUDA graphs
sampling.py   temperature, top-p and seed, for each row of a batch
text.py       tokenizers, and text that grows token by token
server.py     an OpenAI-style HTTP endpoint
"""

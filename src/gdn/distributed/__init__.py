"""Provide context parallelism over torch.distributed: one long sequence on many ranks.

Reading order: `table` (which rank holds which tokens), `plan` (what one rank does for one call), `context`
(the public class), `rule` and `exchange` (the gated delta rule), `halo` (the short convolution), `heads` (the
all-to-all form), `check` (ranks that disagree), `cost` (the model that chooses an exchange).
"""

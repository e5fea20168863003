"""Names of the peers: as providers, in tables, in pages, as packages."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """The names of one peer. module is imported, distribution is what pip installs."""

    title: str
    column: str
    module: str
    distribution: str


PEERS = {
    "fla": Peer("FLA", "fla", "fla", "flash-linear-attention"),
    "flash_qla": Peer("FlashQLA", "qla", "flash_qla", "flash-qla"),
    "flash_kda": Peer("FlashKDA", "kda", "flash_kda", "flash-kda"),
    "flashinfer": Peer("FlashInfer", "fi", "flashinfer", "flashinfer-python"),
    "transformers": Peer("Transformers", "hf", "transformers", "transformers"),
}
PROVIDERS = ("gdn", *PEERS)


def owner_of(provider: str) -> str:
    """Return gdn for gdn:BACKEND, fla for fla:64, else the provider."""
    return provider.partition(":")[0]


def title_of(provider: str) -> str:
    """Return the name of a provider in pages and pictures."""
    return PEERS[provider].title if provider in PEERS else provider

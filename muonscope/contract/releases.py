"""The DeepSpeed releases that a run may train under unmodified, and what is known of the Muon in each.

An allow-list: a version that is not here is never installed, and what is installed must have the published source's
SHA-256. When a release's momentum moves is its own; a run under it says so or says nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from muonscope.contract.status import StepOrdering

_MASTER: Final = StepOrdering.MASTER
_MASTER_BEFORE_STAGE_3: Final = {1: _MASTER, 2: _MASTER}
_MASTER_AT_ALL_STAGES: Final = {**_MASTER_BEFORE_STAGE_3, 3: _MASTER}

_STAGED: Final = {1: StepOrdering.DEFERRED, 2: StepOrdering.DEFERRED, 3: StepOrdering.PER_TENSOR}
_DEFERRED: Final = dict.fromkeys((1, 2, 3), StepOrdering.DEFERRED)
_GRAM_FIRST: Final = ("gram", "standard")
_STANDARD_ONLY: Final = ("standard",)

# First and last release, and the end of a sentence that begins with the release's name.
_KNOWN: Final = (
    ((0, 17, 6), (0, 19, 7), "divides Muon's update by the loss scale"),
    ((0, 18, 9), (0, 19, 7), "moves the momentum once per micro-batch at stage 3"),
    (
        (0, 18, 9),
        (0, 18, 9),
        "fails at stages 1 and 2 with two ranks under torch 2.13: it modifies a split view in place",
    ),
    ((0, 19, 7), (0, 19, 7), "keeps no momentum at stages 1 and 2 but of the last matrix of a partition"),
    ((0, 17, 6), (0, 19, 8), "holds momentum in loss-scaled units"),
)


@dataclass(frozen=True, slots=True)
class Release:
    """One published release."""

    version: str
    sha256: str
    """Of its source distribution as published."""
    orderings: Mapping[int, StepOrdering]
    """Its own ordering by ZeRO stage; a stage that its Muon does not have is missing."""
    ns_methods: tuple[str, ...]
    """Its Newton-Schulz iterations, the default first."""
    has_adam_lr: bool
    """Whether AdamW can be given a learning rate of its own."""
    known: tuple[str, ...]
    """What else is known of it, each as the end of a sentence that begins with its name."""


# As published with each source distribution.
_SHA256: Final = {
    "0.17.6": "b3318064ee5798e8a27d201ea8b888f0439973c4eac9af9ab381dd1862ebdf45",
    "0.18.0": "285901ac891a580d834fe6fd0f6c94a32d17433ecf0a3c789739b15a6c5d80fb",
    "0.18.1": "7dc8d52a23d2d311980b9cfe765075bd8242d6a4050c3fb1126a41b60a8c310d",
    "0.18.2": "892c3213cfefe6df8692d699eae3ca37714cac87afe7f72d4b89acd1df3af1c0",
    "0.18.3": "0ee0002d8205667ee8463dab8461fb5914dac1583440fe1c48a3a385bb4130ea",
    "0.18.4": "4702fb79890cb10f2399bf19254c96d83dc618c9011d77ed37499033b86b4198",
    "0.18.5": "fa35e6e0f50c9a377854b58bd445bf4fb809f2a6a2896099e7cce6b75d10a3d1",
    "0.18.6": "dae0d4285c7badce3a76cab33b29080665bb57926ef9649bd227551f1955ee54",
    "0.18.7": "3763530196f8e7df8fc56d028a8c64409200695213920dc6cf0045d50c884079",
    "0.18.8": "e4e051a144b0c74270c46e4970139f9a86a61ff26959c5e463000c4a93b99304",
    "0.18.9": "ee4818dcf342794f74f429a0aeebef90291ec808fa82609c5140c23e665c4011",
    "0.19.0": "3934044178af8161be6c13475da8c49fd7185cbb0563a4ba43486dc178e7f70b",
    "0.19.1": "75013c83cf0032046b34c5c9e1dfd02a5a32bfad41919e199fa30ba6fb950d4d",
    "0.19.2": "7e854b6ebe3d2bfa239f82958372927631c74e5324c7f08f17ce7ff5f6b06969",
    "0.19.3": "82b4b92d0cd58f8fc461b80428a5be2838f4adad48ae3aef509495c640c9ed2f",
    "0.19.4": "e59353caefc3294f12fd7d8b202c1b8c39c1fdf8c84f4590b2f28ab9cff4c231",
    "0.19.5": "8dc5d32604a3c7a713b3d14de482533bd328ffebe716cdafcc3511953fc90cdf",
    "0.19.6": "31593acffbe4794c74446094122b1bc29d8c73a137e37aff899ca4a6480df2d8",
    "0.19.7": "c6640ecbda08ec6b4b6c72521155351719f145f48d850687b7332f503992921c",
    "0.19.8": "9e491abd0827ea5c389dd702e15e11e13d83d904bac4a20d6c2a4cb37207a9af",
}


def _release(version: str) -> Release:
    """Say what each release's sources do, and what runs under it have shown."""
    number = tuple(map(int, version.split(".")))
    known = [text for first, last, text in _KNOWN if first <= number <= last]
    if number >= (0, 19, 8):
        orderings: dict[int, StepOrdering] = _DEFERRED
    elif number >= (0, 19, 7):
        orderings = _STAGED
    else:
        orderings = _MASTER_AT_ALL_STAGES if number >= (0, 18, 9) else _MASTER_BEFORE_STAGE_3
    return Release(
        version=version,
        sha256=_SHA256[version],
        orderings=orderings,
        ns_methods=_GRAM_FIRST if number >= (0, 19, 0) else _STANDARD_ONLY,
        has_adam_lr=number >= (0, 18, 3),
        known=tuple(known),
    )


RELEASES: Final = {version: _release(version) for version in _SHA256}
SUPPORTED_DEEPSPEED: Final = tuple(RELEASES)
"""Oldest first."""
DEFAULT_DEEPSPEED: Final = "0.19.8"

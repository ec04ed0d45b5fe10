"""The options for writing a package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from canvasrt.containers.package import releases
from canvasrt.containers.package.requirements import Installed
from canvasrt.errors import UsageError
from canvasrt.option import option


@dataclass(frozen=True)
class PackageOptions:
    """The options of a package. `base` is the base image's name; `python` and `tensorrt` are versions in that image."""

    tag: str = field(
        default="canvasrt:latest", metadata=option("The image's name.", metavar="NAME[:TAG]")
    )
    engines: str = field(
        default="copy",
        metadata=option(
            "Copy the engines into the image, or mount them at run time.", metavar="copy|mount"
        ),
    )
    # Without wheels, `docker build` needs a network.
    wheels: bool = field(
        default=False,
        metadata=option("Include all wheels, to build the image without a network."),
    )
    max_batch: int | None = field(
        default=None,
        metadata=option(
            "Maximum number of requests denoised together.",
            metavar="N",
            least=1,
            shown="the engines' limit",
        ),
    )
    base: str = releases.DEFAULT_BASE
    python: str = "3.12"
    tensorrt: str | None = None
    # Download all wheels to determine their hashes.
    fetch: bool = False
    base_digest: str = ""  # the base image's SHA-256, if known
    architecture: str = "amd64"  # the base image's; used if the engines run on any architecture
    # The packages in the base image, if it was read.
    contents: Sequence[Installed] = ()

    def __post_init__(self) -> None:
        if self.engines not in ("copy", "mount"):
            raise UsageError(f"--engines is {self.engines!r}", "give copy or mount")

    def on(self, base: str, python: str | None = None) -> PackageOptions:
        """Return the options for the base image called `base`. If `python` is None, look up the version
        of Python by the image's name.

        Raises UsageError for a malformed digest.
        """
        known = releases.python_of_name(base)
        tensorrt = releases.tensorrt_of_name(base)
        return replace(
            self,
            base=base,
            base_digest=releases.digest_of_name(base),
            python=python or known or self.python,
            tensorrt=tensorrt,
        )

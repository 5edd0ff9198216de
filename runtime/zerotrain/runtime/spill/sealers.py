"""The choice of a spill store's sealer. Called where the spill store is set up; part of the spill store's
info."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum

from zerotrain.runtime._native import openssl_version
from zerotrain.runtime.spill.seal import Encryption, PlainSealer, Sealer, SpillIdentity

CRYPTO_VARIABLE = "ZEROTRAIN_SPILL_CRYPTO"
"""Variable that names the library, where the better one is not wanted."""


class CryptoBackend(Enum):
    """Values of ZEROTRAIN_SPILL_CRYPTO."""

    OPENSSL = "openssl"
    CRYPTOGRAPHY = "cryptography"


def create_sealer(
    encryption: Encryption, identity: SpillIdentity, *, environ: Mapping[str, str] = os.environ
) -> Sealer:
    """Return a sealer with a new key. Raises ValueError where the environment asks for a missing library."""
    if encryption is Encryption.NONE:
        return PlainSealer(identity)
    if chosen_backend(environ) is CryptoBackend.OPENSSL:
        from zerotrain.runtime.spill.sealer_openssl import OpenSslSealer

        return OpenSslSealer(identity)
    from zerotrain.runtime.spill.sealer_cryptography import CryptographySealer

    return CryptographySealer(identity)


def chosen_backend(environ: Mapping[str, str] = os.environ) -> CryptoBackend:
    """Return the library: OpenSSL where the native module has it, as the step runs inside of opening and
    sealing then."""
    has_openssl = bool(openssl_version())
    requested = environ.get(CRYPTO_VARIABLE, "")
    if not requested:
        return CryptoBackend.OPENSSL if has_openssl else CryptoBackend.CRYPTOGRAPHY
    try:
        backend = CryptoBackend(requested)
    except ValueError:
        names = " or ".join(repr(known.value) for known in CryptoBackend)
        raise ValueError(f"{CRYPTO_VARIABLE} must be {names}; got {requested!r}") from None
    if backend is CryptoBackend.OPENSSL and not has_openssl:
        raise ValueError(
            f"{CRYPTO_VARIABLE}=openssl: the native module was built without OpenSSL; unset it, or install "
            "OpenSSL's headers (libssl-dev) and build again"
        )
    return backend

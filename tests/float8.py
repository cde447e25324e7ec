"""Float8 e4m3fn by its definition, for tests: no conversion of torch or of ours is used."""


def e4m3(byte: int) -> float:
    """Sign, four exponent bits (bias 7), three of mantissa; 127 and 255 are NaN, not asked for."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


FINITE = [byte for byte in range(256) if byte & 127 != 127]

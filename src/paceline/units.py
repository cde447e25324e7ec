"""Numbers in words that people read: bytes and seconds."""


def size_text(num_bytes: float) -> str:
    """1,500 -> `1.5 kB`; powers of 1,000, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.2f} TB"


def duration_text(seconds: float) -> str:
    """4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"

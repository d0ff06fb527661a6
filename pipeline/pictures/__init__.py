"""Pictures that somebody else made: what they are called, why one cannot be used, and the only code that opens them."""

FORMAT_SUFFIXES = (
    "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "avif", "jp2", "heic", "heif",
)  # fmt: skip
"""Of files in `pixels.FORMATS`."""

NOT_AN_IMAGE = "not an image"
UNSUPPORTED = "unsupported format"
TOO_MANY_PIXELS = "too many pixels"
TOO_MANY_SCANS = "too many scans"
TRUNCATED = "truncated"
UNDECODABLE = "undecodable"


class ImageError(ValueError):
    """An image cannot be used; `reason` is one of the constants above."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail

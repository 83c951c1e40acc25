"""crc32 as zip files hold it: from zlib-ng where that is installed, five times as fast as Python's own zlib, else from that."""

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # there are no wheels for every machine
    from zlib import crc32

__all__ = ["crc32"]

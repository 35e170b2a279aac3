"""Names of NVMe offload; files, buffers and their sizes are the core's."""

MIN_SWAPPABLE_BYTES = 1024 * 1024

"""The papers, one file each, nothing else. `protofed.registry` imports them."""

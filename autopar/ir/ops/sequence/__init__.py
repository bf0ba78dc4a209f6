"""What operators along a split sequence need: blocks from neighbors, halos of windows, prefixes of scans."""

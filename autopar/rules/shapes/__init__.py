"""Shapes and strides that kernels give and ask for."""

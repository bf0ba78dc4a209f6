"""What runs in the place of local graphs: between collectives torch's interpreter, or what a compiler makes of them."""

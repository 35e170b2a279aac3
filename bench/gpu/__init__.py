"""The comparison on a GPU: works, contestants and how each is measured. `bench/gpu_table.py` is the way in."""
